"""A kernel: compiled C code that is called for every item of some work, by as many threads as it is worth."""

import ctypes
import operator
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from hemiola.plugins.cpu.jit import CFunction
from hemiola.plugins.cpu.simd import MOST_ARGUMENTS, get_long
from hemiola.plugins.cpu.team import ARGUMENTS, ITEMS, Crew, alone, call_up, dismiss, share, usual_threads

WORTH_A_THREAD = 10_000  # nanoseconds of work, for a call by itself: a helper may have to be woken


class _Local(threading.local):
    """The words of a thread's call (team.py)."""

    def __init__(self) -> None:
        self.call = bytearray(8 * (ARGUMENTS + MOST_ARGUMENTS))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.call))


_LOCAL = _Local()


class Kernel(CFunction):
    """Compiled C code `function(item, scratch, *arguments)`, called once for every item of work.

    All of them are int64: `scratch` is the address of memory of the thread's own, and an argument is a
    number, the address of a tensor, or the bits of an fp32 number (simd.from_bits).
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.given = self.arguments[2:]
        if len(self.given) > MOST_ARGUMENTS:
            raise TypeError(f"{self.name} takes {len(self.given)} arguments, more than {MOST_ARGUMENTS}")
        self._pack = struct.Struct(f"{ARGUMENTS + len(self.given)}q").pack_into

    def __call__(
        self,
        num_items: int,
        nanoseconds: float,
        *arguments: Any,  # int, float or tensor
        scratch: int = 0,
    ) -> None:
        """`nanoseconds` of work, roughly, for one thread; `scratch` bytes for each thread."""
        self.check_count(arguments)
        values = [
            value
            if value.__class__ is int
            else value.data_ptr()
            if value.__class__ is torch.Tensor
            else word(value)
            for value in arguments
        ]
        num_threads = min(usual_threads(), num_items) if nanoseconds > WORTH_A_THREAD else 1
        self._pack(_LOCAL.call, 0, self.address, num_items, 0, 0, *values)
        with Crew(num_threads, scratch) as crew:
            _run.ctypes(crew.team.address, _LOCAL.address, crew.num_threads)

    def check_count(self, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != len(self.given):
            raise TypeError(
                f"{self.name} takes {len(self.given)} arguments ({', '.join(self.given)}), "
                f"not {len(arguments)}"
            )


@CFunction
def _run(team, call, num_threads):
    """One call."""
    if num_threads > 1:
        call_up(team, num_threads)
        share(team, call, get_long(call, ITEMS))
        dismiss(team)
    else:
        alone(team, call, get_long(call, ITEMS))


def word(value: float | torch.Tensor) -> int:
    """What a kernel gets for an argument."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return bits(value) if isinstance(value, float) else operator.index(value)


def bits(number: float) -> int:
    """The bits of an fp32 number."""
    return int.from_bytes(struct.pack("f", number), sys.byteorder)
