"""Records from the leader to its followers: a stream of bytes in shared memory, which all of them read.

A follower sleeps until the leader rings (an eventfd), or is gone (a pipe that ends).
"""

import os
import select
import time
from collections.abc import Callable

import numpy as np

from hemiola.runtime.device.ranks import READ, RING, WRITTEN, SharedMemory

LENGTH = 8  # bytes before a record: how long it is
NAP = 2e-4  # seconds until the leader looks again whether there is room


class RecordWriter:
    """The leader's side. bells: an eventfd of each follower."""

    def __init__(self, memory: SharedMemory, bells: list[int], check: Callable[[], None]) -> None:
        """check: raises when nobody will read."""
        self._memory, self._bells, self._check = memory, bells, check

    def write(self, record: bytes) -> None:
        """Waits while a follower has not read what stands in its place."""
        data = np.frombuffer(len(record).to_bytes(LENGTH, "little") + record, np.uint8)
        while len(data):
            data = data[self._put(data) :]

    def _put(self, data: np.ndarray) -> int:
        """As much as there is room for."""
        words, ring = self._memory.words, self._memory.ring
        written = int(words[WRITTEN])
        while (room := RING - (written - self._read())) == 0:
            self._check()
            time.sleep(NAP)
        start = written % RING
        count = min(len(data), room, RING - start)
        ring[start : start + count] = data[:count]
        words[WRITTEN] = written + count
        for bell in self._bells:
            os.eventfd_write(bell, 1)  # and with it all that was written is seen
        return count

    def _read(self) -> int:
        """Bytes that all followers have read."""
        return min(int(self._memory.of(rank)[READ]) for rank in range(1, self._memory.size))


class RecordReader:
    """A follower's side."""

    def __init__(self, memory: SharedMemory, rank: int, bell: int) -> None:
        self._memory, self._counters, self._bell = memory, memory.of(rank), bell
        self._rung = select.poll()  # select() takes no descriptor from 1024 on
        self._rung.register(bell, select.POLLIN)
        self._known = 0  # bytes that are there

    def read(self) -> bytes:
        """The next record; waits for it."""
        length = int.from_bytes(self._take(LENGTH), "little")
        return self._take(length)

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            done = int(self._counters[READ])
            while self._known == done:
                self._rung.poll()
                os.eventfd_read(self._bell)
                self._known = int(self._memory.words[WRITTEN])
            start = done % RING
            count = min(size, self._known - done, RING - start)
            parts.append(self._memory.ring[start : start + count].tobytes())
            self._counters[READ] = done + count
            size -= count
        return b"".join(parts)
