"""What other threads ask of the loop, in the order in which they asked."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from hemiola.runtime.api import OnPiece
from hemiola.runtime.engine.request import Request
from hemiola.runtime.errors import Failed


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request
    on_piece: OnPiece


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: int


class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    drain: bool


Message = Submit | Abort | Flush | Close


class Inbox:
    """Any thread puts, one takes. Behind a refusal no request comes in."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._gate = threading.Lock()  # nobody enters while the refusal changes
        self._refusal: Exception | None = None

    def __len__(self) -> int:
        return self._messages.qsize()

    @property
    def failure(self) -> str:
        return str(self._refusal) if isinstance(self._refusal, Failed) else ""

    def submit(self, request: Request, on_piece: OnPiece) -> None:
        with self._gate:
            self.check()
            self._messages.put(Submit(request, on_piece))

    def check(self) -> None:
        """Raise the refusal, if there is one."""
        if self._refusal is not None:
            raise self._refusal

    def put(self, message: Abort | Flush | Close) -> None:
        self._messages.put(message)

    def refuse(self, refusal: Exception) -> None:
        """Raise this for every request to come. A failure stays, and takes the place of anything else."""
        with self._gate:
            if self._refusal is None or isinstance(refusal, Failed):
                self._refusal = refusal

    def wait(self, seconds: float, on_idle: Callable[[], None]) -> Message:
        """The next message; on_idle is called, once, when none has come after so many seconds."""
        try:
            return self._messages.get(timeout=seconds)
        except Empty:
            on_idle()
            return self._messages.get()

    def take(self) -> Iterator[Message]:
        """All messages there are."""
        while not self._messages.empty():
            yield self._messages.get()
