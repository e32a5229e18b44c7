"""Every compiled form, called on memory that ends where a page begins that nobody may read.

    PYTHONPATH=.:tests:tests/plugins python tests/kit/guard_pages.py

Red zones (redzones.py) find what is written outside of a tensor, and what is read and used. Here any read
ends the process, whatever becomes of the number; so this is a process of its own.
"""

import ctypes
import faulthandler
import mmap
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from kit import redzones
from kit.ops import ALL, Subject, run

from hemiola.plugins.cpu.code import Eager
from hemiola.plugins.cpu.team import MEMBER_WORDS, MEMBERS, SCRATCH, Team

PAGE = mmap.PAGESIZE
PROT_NONE = 0


def at_the_end(num_bytes: int) -> torch.Tensor:
    """So many bytes in front of a page that is closed; behind one, too."""
    size = -(-num_bytes // PAGE) * PAGE
    whole = torch.frombuffer(mmap.mmap(-1, size + 2 * PAGE), dtype=torch.uint8)
    for address in (whole.data_ptr(), whole.data_ptr() + size + PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return whole[PAGE + size - num_bytes : PAGE + size]


class Paged(redzones.Guard):
    """Tensors in front of closed pages."""

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = at_the_end(prod(shape) * dtype.itemsize)
        bits = made if dtype.itemsize % 4 else made.view(torch.int32).fill_(redzones.MARK)
        return bits.view(dtype).view(shape)


def main(calls: list[tuple[Subject, int, int]]) -> None:
    faulthandler.enable()
    guard, rooms, prepare = Paged(), list[torch.Tensor](), Team.prepare

    def closed(self: Team, num_threads: int, scratch: int) -> None:
        prepare(self, num_threads, scratch)
        rooms[:] = [at_the_end(scratch) for _ in range(num_threads)]
        for n, room in enumerate(rooms):
            self._words[MEMBERS + n * MEMBER_WORDS + SCRATCH] = room.data_ptr()

    redzones.GUARDS.append(guard)
    torch.set_num_threads(1)
    with (
        patch.object(Team, "prepare", closed),
        patch.object(Eager, "empty", lambda self, *shape, **named: guard.empty(*shape, **named)),
    ):
        for subject, num_tokens, num_rows in calls:
            print(subject, num_tokens, num_rows, flush=True)
            run(subject, subject.arguments(num_tokens, num_rows=num_rows))


if __name__ == "__main__":
    from test_sizes import calls

    main([(subject, num, 2) for subject in ALL for num in (2, 5, 17, 40)] + [*calls()])
