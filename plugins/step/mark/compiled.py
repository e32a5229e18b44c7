"""When a step on a CPU came to a place, compiled."""

import time

from hemiola.plugins.cpu.atomics import clock_gettime
from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_long, put_long

CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)


def mark(times: Operand, place: int) -> None:
    """See reference.py."""
    code_of(times).call(_mark, 1, 0, times, place, CLOCK, scratch=16)


@Kernel
def _mark(item, scratch, times, place, clock):
    clock_gettime(clock, scratch)
    put_long(times, place, get_long(scratch, 0) * 1_000_000_000 + get_long(scratch, 1))
