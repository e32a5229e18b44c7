"""Page-locked memory of the host, for copies that it does not wait for.

torch has such memory, too, but when a tensor of it dies, torch asks CUDA to record an event. On a device that
is lost this throws, out of a destructor: the process ends, and nobody is told why. So this memory is one that
torch does not know: events are recorded where copies begin, and who lets go of it asks CUDA for nothing.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Locked:
    """Bytes that are lent to one user at a time."""

    def __init__(self, num_bytes: int, free: "deque[Locked]") -> None:
        memory = mmap.mmap(-1, num_bytes)  # shared, so that a fork moves no page
        self.numbers = np.frombuffer(memory, np.uint8)
        self.copied = torch.cuda.Event()  # its last user's copies are done
        self.lent: weakref.ref[Any] | None = None
        self._free = free

    def let_go(self, _: object) -> None:
        """In whatever thread, and whatever this does just then."""
        self._free.append(self)


class Pinned:
    """Blocks by size, a power of two; a block is lent again when nobody refers to it any more and the device
    has passed its copies."""

    def __init__(self) -> None:
        self._free: dict[int, deque[Locked]] = {}
        self._blocks: dict[int, Locked] = {}  # all, by address: what is locked must stay mapped

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Bytes to begin copies with, on the current stream. If that fails, they are lent to nobody else."""
        block = self._take(max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length()))
        numbers = block.numbers[:num_bytes]
        yield torch.from_numpy(numbers)
        block.copied.record()
        block.lent = weakref.ref(numbers, block.let_go)  # all views of it hold this array

    def give_back(self) -> None:
        """Unlock what is lent to nobody."""
        for free in list(self._free.values()):
            for block in list(_passed(free)):
                address = block.numbers.ctypes.data
                unlock(address)
                del self._blocks[address]

    def _take(self, size: int) -> Locked:
        free = self._free.setdefault(size, deque())
        return next(_passed(free), None) or self._new(size, free)

    def _new(self, size: int, free: deque[Locked]) -> Locked:
        block = Locked(size, free)
        address = block.numbers.ctypes.data
        lock(address, size)
        self._blocks[address] = block
        return block


def lock(address: int, num_bytes: int) -> None:
    """Page-lock memory. Raises RuntimeError where the host has not so much, or the device is lost."""
    error = _cuda().cudaHostRegister(address, num_bytes, 0)
    _check(error, f"{num_bytes} bytes of the host cannot be page-locked")


def unlock(address: int) -> None:
    """Raises RuntimeError where the device is lost."""
    _check(_cuda().cudaHostUnregister(address), "page-locked memory stays locked")


def _passed(free: deque[Locked]) -> Iterator[Locked]:
    """Taken out of `free`: blocks that can be lent again. Raises where the device is lost."""
    for _ in range(len(free)):
        try:
            block = free.popleft()
        except IndexError:  # another thread was sooner
            return
        if block.copied.query():
            yield block
        else:
            free.append(block)


def _cuda() -> Any:
    return torch.cuda.cudart()


def _check(error: Any, what: str) -> None:
    if int(error):
        raise RuntimeError(f"{what} (CUDA error: {_cuda().cudaGetErrorString(error)})")


PINNED = Pinned()  # the process's, as page-locked memory is
