"""What the engine says, on its way out through tritonserver."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hemiola.runtime.api import Piece
from hemiola.runtime.serving.log import Printer
from hemiola.runtime.serving.metrics import Meter
from hemiola.runtime.serving.response import ResponseTensor, tensors
from hemiola.runtime.serving.stream import Branch, Failure, Reason, Stream, error_of, line_of, outcome_of

CHECK_S = 0.1  # between looks for callers that left and requests whose time is over


class Outlet(Protocol):
    """Tritonserver's Python backend, as far as an answer needs it."""

    def send(self, sender: Any, response: list[ResponseTensor], last: bool) -> None: ...

    def fail(self, sender: Any, code: str, message: str) -> None: ...

    def log(self, text: str) -> None: ...


def error_line(where: str, error: Exception) -> str:
    return f"{where}: {type(error).__name__}: {error}"


class Replies:
    """Sends from a thread of its own, since one send is a round trip of 0.2 ms to the server's process.

    All that a request said while the thread was busy becomes one response: a slow server makes longer pieces,
    not a slower engine. The same thread looks for callers that went away.
    """

    def __init__(
        self, abort: Callable[[int], None], meter: Meter, outlet: Outlet, log_requests: bool = False
    ) -> None:
        self._abort = abort  # the engine's, by request id
        self._outlet = outlet
        self._meter = meter
        self._log_requests = log_requests
        self._printer = Printer()
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._open: dict[int, Stream] = {}  # by Python's id
        self._ends: deque[float] = deque(maxlen=32)  # when the last answers ended
        self._sending = math.inf  # since when
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return sum(len(stream.branches) for stream in list(self._open.values()))

    @property
    def stalled_s(self) -> float:
        """For so long the server has not taken an answer."""
        return max(0.0, time.monotonic() - self._sending)

    @property
    def seconds_per_answer(self) -> float:
        ends = list(self._ends)
        return (time.monotonic() - ends[0]) / len(ends) if ends else 1.0

    def add(self, stream: Stream) -> None:
        self._open[id(stream)] = stream

    def drop(self, stream: Stream) -> None:
        """Nobody waits for it any more."""
        self._open.pop(id(stream), None)
        self.abort(stream)

    def listener(self, branch: Branch) -> Any:
        """An on_piece."""
        return lambda piece: self.post(branch, piece)

    def post(self, branch: Branch, piece: Piece) -> None:
        """Called by the engine's thread for every piece; never waits."""
        stream = branch.stream
        if piece.token_ids:
            now = time.perf_counter()
            if branch.last_said:
                self._meter.later(now - branch.last_said, len(piece.token_ids))
            else:
                self._meter.first(now - stream.arrival)
            branch.last_said = now
            if now > stream.deadline and piece.finish_reason is None and not stream.aborted:
                self.abort(stream, "timeout")
        branch.said.append(piece)
        stream.num_running -= piece.finish_reason is not None
        if stream.flags["stream"] or not stream.num_running:
            self._ready.put(stream)

    def cancel(self, names: list[str]) -> None:
        """End requests by their callers' ids; those that have ended already are left alone."""
        for stream in list(self._open.values()):
            if stream.name in names and stream.name:
                self.abort(stream)

    def abort(self, stream: Stream, reason: Reason = "cancelled") -> None:
        """The engine answers with last pieces, which end the stream. No id yet: _submit aborts it."""
        stream.end(reason)
        for branch in stream.branches:
            if branch.request_id is not None:
                self._abort(branch.request_id)

    def close(self) -> None:
        """Sends what has been said and ends the thread."""
        self._ready.put(None)
        self._thread.join()
        self._printer.flush()

    def _run(self) -> None:
        next_check = time.monotonic() + CHECK_S
        while True:
            try:
                stream = self._ready.get(timeout=max(0.0, next_check - time.monotonic()))
                if stream is None:
                    return
                self._sending = time.monotonic()
                self._send(stream)
            except queue.Empty:
                pass
            if time.monotonic() >= next_check:
                self._sending = time.monotonic()
                self._check()
                next_check = time.monotonic() + CHECK_S
            self._sending = math.inf

    def _send(self, stream: Stream) -> None:
        said = [[b.said.popleft() for _ in range(len(b.said))] for b in stream.branches]
        if not any(said) or id(stream) not in self._open:
            return  # an earlier turn took this piece along
        over = all(pieces and pieces[-1].finish_reason for pieces in said)
        failure = self._end(stream, [pieces[-1] for pieces in said]) if over else None
        try:
            if failure is not None:
                self._outlet.fail(stream.sender, *failure)
            else:
                self._outlet.send(stream.sender, tensors(stream, said, over), over)
        except Exception as error:  # one stream's trouble: the thread serves the others
            self._outlet.log(error_line(f"request {stream.branches[0].request_id}", error))
            if not over:
                self.abort(stream)

    def _end(self, stream: Stream, lasts: list[Piece]) -> Failure | None:
        self._open.pop(id(stream), None)
        self._ends.append(time.monotonic())
        failure = error_of(stream, lasts)
        outcome = outcome_of(stream, failure)
        self._meter.ended(outcome)
        for last in lasts:
            if last.metrics is not None:
                self._meter.measured(last.metrics, whole=outcome == "success")
        if self._log_requests:
            self._printer.say(f"{line_of(stream, lasts, outcome)}\n")
        return failure

    def _check(self) -> None:
        """Callers that went away, and requests whose time is over."""
        now = time.perf_counter()
        for stream in list(self._open.values()):
            if stream.aborted:
                continue
            if now > stream.deadline:
                self.abort(stream, "timeout")
            elif self._is_cancelled(stream):
                self.abort(stream)

    def _is_cancelled(self, stream: Stream) -> bool:
        """Whether the caller left; a sender that cannot tell has nobody to send to."""
        try:
            return stream.sender.is_cancelled()
        except Exception as error:
            self._outlet.log(error_line(f"request {stream.branches[0].request_id}", error))
            return True
