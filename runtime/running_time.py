"""A clock that stands still while this process is stopped."""

import threading
import time

TICK = 0.25  # seconds


class RunningTime:
    """Seconds in which this process ran, until `end`. While one is stopped (SIGSTOP, a paused container), it
    sees no disk and no engine move: a pause counts as two ticks, however long it was."""

    def __init__(self) -> None:
        self.wall = time.monotonic
        self._last = 0.0, self.wall()  # seconds at the last tick, and when that was
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="hemiola-clock", daemon=True).start()

    def __call__(self) -> float:
        return self._at(self.wall())

    def _at(self, wall: float) -> float:
        seconds, at = self._last
        return seconds + min(wall - at, 2 * TICK)

    def tick(self) -> None:
        wall = self.wall()  # once: what passes between two looks would be lost, and the clock go back
        self._last = self._at(wall), wall

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(TICK):
            self.tick()
