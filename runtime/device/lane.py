"""Copies beside a device's steps.

They run in the order in which they begin, on a stream of their own, each behind the steps that were launched
before it. Steps go on beside them; where one needs a copy, it is launched behind a mark of that copy. The
host waits for neither.
"""

from collections.abc import Callable

import torch


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

    def do(self, copy: Callable[[], None]) -> None:
        """Begin a copy, behind all that the device was given so far."""
        if self._stream is None:
            copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()

    def mark(self) -> Mark:
        if self._stream is None:
            return Mark(None)
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)

    def hold(self, mark: Mark) -> None:
        """Let the steps that are launched from now on run behind it."""
        if mark.event is not None:
            torch.cuda.current_stream(self._device).wait_event(mark.event)
