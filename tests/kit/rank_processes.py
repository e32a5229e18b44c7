"""Ranks as processes of one machine whose interpreted kernels exchange like those of GPUs: they wait for each
other in the middle of a kernel, and Triton's interpreter runs one kernel of a process at a time."""

import ctypes
import mmap
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from kit import memcheck

from hemiola.plugins.gpu.windows import window_bytes
from hemiola.plugins.ranks import LINE, make_group

Run = Callable[[int, torch.Tensor], Any]  # of a rank and its group


class SharedWindows:
    """Memory that the processes which are forked later have in common; for as long as this is kept."""

    def __init__(self, size: int) -> None:
        width = window_bytes(size)
        self._map = mmap.mmap(-1, LINE + size * width)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        stop = memory.data_ptr()
        self.stop = ctypes.c_int64.from_address(stop)
        self.groups = [
            make_group(rank, [stop + LINE + n * width for n in range(size)], 0, stop) for rank in range(size)
        ]
        memcheck.SHARED[:] = [memory]

    def run(self, run: Run) -> list[Any]:
        """run(rank, group) on all ranks; what each returns. An error of one is raised here."""
        context = multiprocessing.get_context("fork")
        ends, processes = [], []
        for rank, group in enumerate(self.groups):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(run, rank, group, there), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            found = [pickle.loads(end.recv_bytes()) for end in ends]
        finally:
            self.stop.value = 1  # a rank that failed leaves others waiting
            for process in processes:
                process.join()
            self.stop.value = 0
        for made in found:
            if isinstance(made, BaseException):
                raise made
        return found


def _run(run: Run, rank: int, group: torch.Tensor, end: Connection) -> None:
    try:
        made = run(rank, group)
    except BaseException as error:
        made = error
    end.send_bytes(pickle.dumps(made))
