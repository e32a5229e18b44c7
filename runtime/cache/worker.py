"""A thread that does tasks in order, with helpers that share the pieces of one.

A disk may hang: then a read or a write does not return, and nothing can end its thread. So these threads hold
up neither who asks nor the end of the process, and `stalled_s` says for how long nothing has moved.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from hemiola.runtime.running_time import RunningTime

log = logging.getLogger("hemiola")


class Worker:
    """on_end: is called in the thread when it ends. Its other methods are those of one thread, that asks."""

    def __init__(self, name: str, num_helpers: int, on_end: Callable[[], object]) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pieces: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._on_end = on_end
        self._num_asked = self._num_done = 0  # by who asks, by the thread
        self._moved = 0.0  # by `clock`: when a piece or a task ended or began
        self.clock: Callable[[], float] = (clock := RunningTime())
        self._end_clock = clock.end
        self._helpers = [self._start(self._help, f"{name}-{number}") for number in range(num_helpers)]
        self._thread = self._start(self._work, name)

    def _start(self, target: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def ask(self, task: Callable[[], object]) -> None:
        if self._num_asked == self._num_done:
            self._moved = self.clock()
        self._num_asked += 1
        self._tasks.put(task)

    @property
    def stalled_s(self) -> float:
        """For how long nothing that was asked has moved; 0 where all is done."""
        return self.clock() - self._moved if self._num_asked > self._num_done else 0.0

    def close(self, seconds: float) -> bool:
        """End behind what was asked; False if that takes longer, and is left to itself."""
        self._tasks.put(None)
        self._thread.join(seconds)
        self._end_clock()
        return not self._thread.is_alive()

    # What tasks call.

    def share(self, do: Callable[[Any], bool], pieces: Sequence[Any]) -> bool:
        """Whether all pieces were done well. One that raises was not."""
        results: SimpleQueue[bool] = SimpleQueue()

        def attempt(piece: Any) -> None:
            done = False
            try:
                done = do(piece)
            except BaseException:
                log.exception("%s", threading.current_thread().name)
            self._moved = self.clock()
            results.put(done)

        for piece in pieces:
            self._pieces.put(lambda piece=piece: attempt(piece))
        return all([results.get() for _ in pieces])

    def _help(self) -> None:
        while (piece := self._pieces.get()) is not None:
            piece()
            del piece  # it holds an engine, and the next may be long in coming

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._moved = self.clock()
            try:
                task()
            except BaseException:
                log.exception("%s", threading.current_thread().name)
            self._num_done += 1
            del task
        for _ in self._helpers:
            self._pieces.put(None)
        self._on_end()
