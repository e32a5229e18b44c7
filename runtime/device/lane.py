"""Copies beside a device's steps.

They run in the order in which they begin, on a stream of their own, each behind the steps that were launched
before it. Steps go on beside them; where one needs a copy, it is launched behind a mark of that copy. The
host waits for neither.
"""

from collections import deque
from collections.abc import Callable

import torch

MAX_PLACING = 1  # second halves beside which the next copy runs; each holds memory of the device


class Mark:
    """The copies of a lane up to here."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event  # None: they are done

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Until they are done."""
        if self.event is not None:
            self.event.synchronize()


class Lane:
    """On a CPU a copy is done when it is begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._places = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._placing: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()  # and what is read for it

    def do(self, copy: Callable[[], None]) -> None:
        """Begin a copy, behind all that the device was given so far."""
        if self._stream is None:
            copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()

    def load(self, bring: Callable[[], torch.Tensor], place: Callable[[torch.Tensor], None]) -> None:
        """Begin a copy of two halves, behind all that the device was given so far. The second half runs
        beside the first one of the next copy, so that the bus is never idle."""
        if self._stream is None or self._places is None:
            place(bring())
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            content = bring()
        self._places.wait_stream(self._stream)
        with torch.cuda.stream(self._places):
            place(content)
        event = torch.cuda.Event()
        event.record(self._places)
        self._placing.append((event, content))
        self._let_place(MAX_PLACING)

    def _let_place(self, num_left: int) -> None:
        """Copies from now on run behind second halves, but for so many, and may use their memory."""
        assert self._stream is not None
        while len(self._placing) > num_left:
            event, _ = self._placing.popleft()
            self._stream.wait_event(event)

    def mark(self) -> Mark:
        if self._stream is None:
            return Mark(None)
        self._let_place(0)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def hold(self, mark: Mark) -> None:
        """Let the steps that are launched from now on run behind it."""
        if mark.event is not None:
            torch.cuda.current_stream(self._device).wait_event(mark.event)
