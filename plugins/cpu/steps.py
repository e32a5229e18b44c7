"""Recorded code as a step: one call replays its kernels over an arena, without Python between them.

When a step is made, the memory of what lies in its arena is planned: lines of one first dimension share a
region, whose size follows from that dimension, and within it lines are given to a result from the call that
writes it to the last one that reads it. A call's numbers that depend on the step's sizes are formulas
(sizes.py), which the replay computes first.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hemiola.plugins.cpu.code import Buffer, Fault, KernelCall, Recorder, View
from hemiola.plugins.cpu.jit import CFunction, helper
from hemiola.plugins.cpu.kernel import bits
from hemiola.plugins.cpu.moves import poison
from hemiola.plugins.cpu.simd import MOST_ARGUMENTS, get_long, put_long
from hemiola.plugins.cpu.sizes import Builder
from hemiola.plugins.cpu.team import (
    ARGUMENTS,
    COST,
    FAULT,
    ITEMS,
    Crew,
    alone,
    call_up,
    dismiss,
    share,
    usual_threads,
)
from hemiola.plugins.sizes import (
    ADD,
    CEIL_DIV,
    FLOOR_DIV,
    MAX,
    MIN,
    MUL,
    PARTS,
    SUB,
    FreeSize,
    Number,
    evaluate,
    names_of,
)

LINE = 64  # bytes of a cache line
CALL_WORDS = ARGUMENTS + MOST_ARGUMENTS
WORTH_A_TEAM = 3_000  # nanoseconds of a call
MOST_KNOWN = 4096  # sizes that are remembered
ARENA = "arena"  # the input that is its address
WORTH, FOUND, INPUTS, MOVED = 7, 8, 9, 10  # words of the header, see _fill_in
_MOVED = np.zeros(1, np.int64)


def num_calls() -> int:
    """That steps of this process have begun: a step that takes long moves as long as this does."""
    return int(_MOVED[0])


class _Life(NamedTuple):
    first: int  # the call that writes it
    last: int  # that reads it


class RecordedStep:
    """What a recorder wrote down, ready to run with any sizes."""

    def __init__(self, recorder: Recorder, inputs: list[str], poisoned: bool = False) -> None:
        """`inputs`: the names of sizes and addresses that a run gets; with `poisoned`, memory of the arena is
        NaN again whenever it is given to another result."""
        taken = recorder.calls
        recorder.calls = []  # views name their recorder: else a circle that holds weights
        calls = _poisoned(taken) if poisoned else taken
        self._calls, self._keep = calls, [call.arguments for call in calls]  # tensors and faults stay
        places, self._arena_bytes = _plan(calls)
        builder = Builder([*inputs, "threads", ARENA])
        table = np.zeros((len(calls), CALL_WORDS), np.int64)
        patches: list[tuple[int, int]] = []
        for n, call in enumerate(calls):
            for word, number in enumerate(_words(call, places)):
                if isinstance(number, int):
                    table[n, word] = number
                else:
                    patches.append((n * CALL_WORDS + word, builder.place(number)))
        formulas = builder.finish()
        self.inputs = formulas.inputs
        self._faults = {fault.words.data_ptr(): fault for call in calls for fault in _faults(call)}
        self._scratch = max((call.scratch for call in calls), default=0)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_address = 0
        self._sizes = names_of(self._arena_bytes)
        self._fitting: set[tuple[int | None, ...]] = set()  # sizes of steps that have fitted into the arena
        self._values = formulas.values
        self._tables = (self._values, formulas.operations, np.array(patches, np.int64).reshape(-1, 2), table)
        lengths = [len(self._tables[n]) for n in (1, 2, 3)]
        addresses = [table.ctypes.data for table in self._tables]
        rest = [WORTH_A_TEAM, 0, len(self.inputs), _MOVED.ctypes.data]
        self._header = np.array([*addresses, *lengths, *rest], np.int64)
        self._header_address = self._header.ctypes.data

    def run(self, given: dict[str, int]) -> None:
        """With these sizes and addresses. Raises what a kernel found wrong with what it was given."""
        run_all([(self, given)])

    def room(self, sizes: Mapping[str, int]) -> int:
        """Bytes that it takes at these sizes: its arena, and scratch memory of each thread."""
        return evaluate(self._arena_bytes, sizes) + usual_threads() * self._scratch

    def _prepare(self, given: dict[str, int]) -> None:
        sizes = tuple(map(given.get, self._sizes))
        if sizes not in self._fitting:
            if len(self._fitting) == MOST_KNOWN:
                self._fitting.clear()
            self._make_room(evaluate(self._arena_bytes, given))
            self._fitting.add(sizes)

    def _check(self) -> None:
        if found := int(self._header[FOUND]):
            self._faults[found].check()

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._arena.numel() - LINE:
            self._arena = torch.empty(num_bytes + LINE, dtype=torch.uint8)
        address = self._arena.data_ptr()
        self._arena_address = address + -address % LINE


def run_all(steps: Sequence[tuple[RecordedStep, dict[str, int]]]) -> None:
    """Steps one after the other in one call, each with its sizes and addresses in the order of its inputs."""
    words, places, scratch = array("q"), [], 0
    for step, given in steps:
        step._prepare(given)
        scratch = max(scratch, step._scratch)
    with Crew(usual_threads(), scratch) as crew:
        for step, given in steps:
            places.append(len(words))
            words.extend([*given.values(), crew.num_threads, step._arena_address])
        start, _ = words.buffer_info()
        queue = array("q")
        for (step, _), place in zip(steps, places, strict=True):
            queue.extend([step._header_address, start + 8 * place])
        _replay.ctypes(queue.buffer_info()[0], len(steps), crew.team.address, crew.num_threads)
    for step, _ in steps:
        step._check()


def _words(call: KernelCall, places: Mapping[Buffer, Number]) -> list[Number]:
    """What the replay and the kernel read of a call."""
    faults = _faults(call)
    assert len(faults) <= 1
    fault = faults[0].words.data_ptr() if faults else 0
    return [
        call.kernel.address,
        call.num_items,
        call.nanoseconds,
        fault,
        *(_word(value, places) for value in call.arguments),
    ]


def _faults(call: KernelCall) -> list[Fault]:
    return [value for value in call.arguments if isinstance(value, Fault)]


def _word(value: Any, places: Mapping[Buffer, Number]) -> Number:
    match value:
        case View(buffer=buffer):
            offset = value.offset * value.itemsize
            if buffer.tensor is not None:
                return buffer.tensor.data_ptr() + offset
            return (FreeSize(buffer.input) if buffer.input else places[buffer]) + offset
        case Fault():
            return value.words.data_ptr()
        case float():
            return bits(value)
        case FreeSize():
            return value
        case _:
            return int(value)


def _lives(calls: list[KernelCall]) -> dict[Buffer, _Life]:
    """From which call to which what lies in the arena is wanted, in the order of the first."""
    lives: dict[Buffer, _Life] = {}
    for n, call in enumerate(calls):
        for value in call.arguments:
            if isinstance(value, View) and value.buffer.tensor is None and not value.buffer.input:
                first = lives[value.buffer].first if value.buffer in lives else n
                lives[value.buffer] = _Life(first, n)
    return lives


def _plan(calls: list[KernelCall]) -> tuple[dict[Buffer, Number], Number]:
    """Where in memory everything of the arena lies, and how many bytes that takes."""
    regions: dict[Number, dict[Buffer, int]] = {}  # by first dimension: the offset of a line
    widths: dict[Number, int] = {}
    lives = _lives(calls)
    for buffer, life in lives.items():
        region = regions.setdefault(buffer.lead, {})
        others = [(at, _room(other)) for other, at in region.items() if lives[other].last >= life.first]
        at = 0
        for begin, size in sorted(others):
            if begin - at >= _room(buffer):
                break
            at = max(at, begin + size)
        region[buffer] = at
        widths[buffer.lead] = max(widths.get(buffer.lead, 0), at + _room(buffer))
    places: dict[Buffer, Number] = {}
    end: Number = 0
    for lead, region in regions.items():
        for buffer, at in region.items():
            places[buffer] = FreeSize(ARENA) + end + lead * at
        end = lead * widths[lead] + end
    return places, end


def _room(buffer: Buffer) -> int:
    return -(-buffer.line_bytes // LINE) * LINE


def _poisoned(calls: list[KernelCall]) -> list[KernelCall]:
    """With a call before the first that names a result, which fills it with NaN."""
    seen: set[Buffer] = set()
    found = []
    for call in calls:
        for value in call.arguments:
            if isinstance(value, View) and value.buffer.line_bytes and value.buffer not in seen:
                seen.add(value.buffer)
                whole = View(value.code, value.buffer, (), (), value.dtype)
                found.append(KernelCall(poison, 1, 0, (value.buffer.lead, value.buffer.line_bytes, whole), 0))
        found.append(call)
    return found


@CFunction
def _replay(queue, count, team, num_threads):
    """queue: of each step its header and its inputs. The first fault ends them all."""
    if num_threads > 1:
        call_up(team, num_threads)
    for n in range(count):
        header = get_long(queue, 2 * n)
        _fill_in(header, get_long(queue, 2 * n + 1))
        if not _run(header, team, num_threads):
            break
    if num_threads > 1:
        dismiss(team)


@helper
def _fill_in(header, given):
    """header: values, operations, patches, calls; how many of the last three; from how many nanoseconds on a
    call is shared; the fault that ended the step; how many numbers it is given; and where this process counts
    its calls."""
    values, operations = get_long(header, 0), get_long(header, 1)
    patches, calls = get_long(header, 2), get_long(header, 3)
    for n in range(get_long(header, INPUTS)):
        put_long(values, n, get_long(given, n))
    for n in range(get_long(header, 4)):
        kind = get_long(operations, 4 * n)
        a = get_long(values, get_long(operations, 4 * n + 1))
        b = get_long(values, get_long(operations, 4 * n + 2))
        if kind == ADD:
            a = a + b
        elif kind == SUB:
            a = a - b
        elif kind == MUL:
            a = a * b
        elif kind == FLOOR_DIV:
            a = a // b
        elif kind == CEIL_DIV:
            a = -(-a // b)
        elif kind == MIN:
            a = min(a, b)
        elif kind == MAX:
            a = max(a, b)
        else:
            a = a * b // PARTS
        put_long(values, get_long(operations, 4 * n + 3), a)
    for n in range(get_long(header, 5)):
        put_long(calls, get_long(patches, 2 * n), get_long(values, get_long(patches, 2 * n + 1)))


@helper
def _run(header, team, num_threads):
    """All calls of a step whose numbers are filled in, or those up to a fault; whether there was none."""
    put_long(header, FOUND, 0)
    calls, worth, moved = get_long(header, 3), get_long(header, WORTH), get_long(header, MOVED)
    for n in range(get_long(header, 6)):
        put_long(moved, 0, get_long(moved, 0) + 1)
        call = calls + 8 * CALL_WORDS * n
        num_items, fault = get_long(call, ITEMS), get_long(call, FAULT)
        if num_threads > 1 and num_items > 1 and get_long(call, COST) > worth:
            share(team, call, num_items)
        else:
            alone(team, call, num_items)
        if fault != 0 and get_long(fault, 0) != 0:
            put_long(header, FOUND, fault)
            return False
    return True
