"""The way of pieces from the engine's thread to the event loop of Dynamo's worker."""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextvars import Context

from hemiola.runtime.api import Piece


class Doorbell:
    """Wakes the event loop once for all pieces of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._streams: deque[PieceStream] = deque()  # that have new pieces
        self._has_rung = False

    def ring(self, stream: "PieceStream") -> None:
        """By any thread."""
        self._streams.append(stream)
        if not self._has_rung:
            self._has_rung = True
            self.loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        self._has_rung = False  # first: what comes from now on rings again
        try:
            while self._streams:
                self._streams.popleft().wake()
        finally:
            if self._streams:  # a task raised KeyboardInterrupt or SystemExit
                self.loop.call_soon(self._open)


class PieceStream:
    """The pieces of one request, from the engine's thread to the one task that awaits them.

    To that task it is a future of asyncio's, whose names these are. But it steps the task at once, where a
    Future would let the loop come round for every piece; that is a third of what a piece costs.
    """

    __slots__ = ("_asyncio_future_blocking", "_bell", "_context", "_is_cancelled", "_pieces", "_step")

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._pieces: deque[Piece] = deque()
        self._asyncio_future_blocking = False
        self._step: Callable[[PieceStream], object] | None = None  # of the task, while it waits
        self._context = Context()
        self._is_cancelled = False

    def put(self, piece: Piece) -> None:
        """By any thread."""
        self._pieces.append(piece)
        self._bell.ring(self)

    def wake(self) -> None:
        if self._step is not None and (self._pieces or self._is_cancelled):
            step, self._step = self._step, None
            self._context.run(step, self)

    def __await__(self) -> Generator["PieceStream", None, Piece]:
        while not self._pieces:
            self._asyncio_future_blocking = True
            yield self
        return self._pieces.popleft()

    # What a task asks of the future that it waits for.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._bell.loop

    def add_done_callback(self, step: "Callable[[PieceStream], object]", *, context: Context) -> None:
        self._step, self._context = step, context

    def cancel(self, msg: object = None) -> bool:
        """The task is cancelled: it is woken, and `result` tells it."""
        if self._step is None:
            return False
        self._is_cancelled = True
        self._bell.ring(self)
        return True

    def result(self) -> None:
        if self._is_cancelled:
            self._is_cancelled = False
            raise asyncio.CancelledError
