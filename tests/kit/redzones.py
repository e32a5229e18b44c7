"""Red zones around the memory of the CPU's compiled kernels: arguments, results, scratch, arenas and states.

A kernel has no bounds of its own. Inside `red_zones`, what lies around a tensor is a NaN that nothing
computes: a number written there is found after the call, one read from there shows in the results. Fresh
results and scratch hold the same NaN, and scratch has no more bytes than the call asked for.
"""

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch

from hemiola.plugins.cpu import steps
from hemiola.plugins.cpu.code import Buffer, Case, Eager, Fault, KernelCall, View, complain
from hemiola.plugins.cpu.jit import CFunction, helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import poison
from hemiola.plugins.cpu.simd import get_int, put_int, put_long
from hemiola.plugins.cpu.team import MEMBER_WORDS, MEMBERS, SCRATCH, Crew, Team
from hemiola.plugins.sizes import FreeSize, Number
from hemiola.runtime.device import lower, memory
from hemiola.runtime.step import ledger, recorded

ZONE = 1024  # bytes
# A signalling NaN, which arithmetic makes a quiet one, and other bits at every address: what was read outside
# and is written outside again shows, too. As an integer it is nowhere's index.
MARK = 0x7F910000
SPARE = 2**20  # bytes behind scratch and arenas: what is written there ends no process before it is found
NUM_KEPT = 64  # tensors that are checked when a call takes them
NEVER = 1 << 40  # an offset that no zone has


@helper
def _mark(address, begin, end):
    """Bytes begin .. end from the address on."""
    for i in range(begin // 4, end // 4):
        put_int(address, i, MARK + (address // 4 + i) % 65521)


@helper
def _changed(address, begin, end):
    """The first byte of begin .. end that is not as it was marked."""
    for i in range(begin // 4, end // 4):
        if get_int(address, i) != MARK + (address // 4 + i) % 65521:
            return 4 * i
    return NEVER


@helper
def _outside(address, num_bytes):
    """The first changed byte around so many bytes, counted from their beginning."""
    end = (num_bytes + 3) // 4 * 4
    return min(_changed(address, -ZONE, 0), _changed(address, end, end + ZONE))


@CFunction
def _find(address, num_bytes, found):
    put_long(found, 0, _outside(address, num_bytes))


@CFunction
def _surround(address, num_bytes):
    """Marks so many bytes and what is around them."""
    _mark(address, -ZONE, num_bytes + ZONE)


@Kernel
def _begin(item, scratch, lead, line_bytes, address):
    """A result of a step: nothing is written yet."""
    _mark(address, -ZONE, lead * line_bytes + ZONE)


@Kernel
def _begin_call(item, scratch, scratch_bytes):
    _mark(scratch, 0, scratch_bytes + ZONE)


@Kernel
def _end(item, scratch, lead, line_bytes, address, fault):
    """A call of a step that had this result among its arguments has returned."""
    offset = _outside(address, lead * line_bytes)
    if offset != NEVER:
        complain(fault, 1, offset, lead * line_bytes)


@Kernel
def _end_call(item, scratch, scratch_bytes, fault):
    offset = _changed(scratch, scratch_bytes, scratch_bytes + ZONE)
    if offset != NEVER:
        complain(fault, 1, offset, scratch_bytes)


def _check(address: int, num_bytes: int, name: str, what: str) -> None:
    found = torch.zeros(1, dtype=torch.int64)
    _find.ctypes(address, num_bytes, found.data_ptr())
    if found.item() != NEVER:
        raise AssertionError(f"{name} writes byte {found.item()} of {num_bytes} bytes of {what}")


class Guard:
    """Tensors between red zones."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, int]] = {}  # by address: memory, bytes between its zones
        self._states: list[tuple[torch.Tensor, int]] = []
        self._behind = MARK.to_bytes(8, "little") * 32
        self._told = array("q", self._behind)

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes = shape[0] if shape and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        whole, num = _marked(prod(sizes) * dtype.itemsize)
        self._kept[whole.data_ptr()] = whole, num
        if len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        return whole[ZONE : ZONE + num].view(dtype).view(sizes)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the same strides, gaps included."""
        if not tensor.numel():
            return tensor
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        line = self.empty(span, dtype=tensor.dtype)
        line.copy_(tensor.as_strided((span,), (1,)))
        return line.as_strided(tensor.shape, tensor.stride(), line.storage_offset())

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """State tensors, which are checked after every step."""
        whole, num = _marked(prod(shape) * dtype.itemsize)
        self._states.append((whole, num))
        return whole[ZONE : ZONE + num].zero_().view(dtype).view(shape)

    def array(self, kind: str, content: bytes = b"") -> "array[int]":
        """What a step tells the host, with a zone behind it, if its size is known."""
        made = array(kind, content + self._behind if content else content)
        if content:
            self._told = made
        return made

    def check_arguments(self, name: str, arguments: tuple[Any, ...]) -> None:
        for value in arguments:
            if isinstance(value, torch.Tensor):
                kept = self._kept.get(value.untyped_storage().data_ptr())
                if kept is not None:
                    _check(kept[0].data_ptr() + ZONE, kept[1], name, "an argument")

    def check_states(self) -> None:
        for whole, num in self._states:
            _check(whole.data_ptr() + ZONE, num, "a step", "a state")
        if not self._told.tobytes().endswith(self._behind):
            raise AssertionError("a step writes behind what it tells the host")


def _marked(num_bytes: int) -> tuple[torch.Tensor, int]:
    """Memory for so many bytes and their zones."""
    whole = torch.empty(2 * ZONE + (num_bytes + 3) // 4 * 4, dtype=torch.uint8)
    _surround.ctypes(whole.data_ptr() + ZONE, (num_bytes + 3) // 4 * 4)
    return whole, num_bytes


GUARDS: list[Guard] = []


@contextmanager
def given(values: list[Any], changed: list[bool]) -> Iterator[list[Any]]:
    """Arguments of a form, inside `red_zones` copied between zones; what it changes is copied back."""
    if not GUARDS:
        yield values
        return
    moved = [GUARDS[-1].moved(value) if isinstance(value, torch.Tensor) else value for value in values]
    try:
        yield moved
    finally:
        for value, copy, is_changed in zip(values, moved, changed, strict=False):
            if is_changed:
                value.copy_(copy)


@contextmanager
def red_zones(engines: bool = False) -> Iterator[None]:
    """Around all that kernels called at once work on; `engines`: in recorded steps and around states, too."""
    guard, teams = Guard(), set[Team]()
    call, leave, prepare = Kernel.__call__, Crew.__exit__, Team.prepare

    def checked_call(
        self: Kernel, num_items: int, nanoseconds: float, *arguments: Any, scratch: int = 0
    ) -> None:
        try:
            call(self, num_items, nanoseconds, *arguments, scratch=scratch)
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from None
        guard.check_arguments(self.name, arguments)

    def surrounded(self: Team, num_threads: int, scratch: int) -> None:
        prepare(self, num_threads, scratch + 2 * ZONE + SPARE)
        teams.add(self)
        for n in range(num_threads):
            room = self._rooms[n].data_ptr()
            address = room + -room % 64 + ZONE
            self._words[MEMBERS + n * MEMBER_WORDS + SCRATCH] = address
            _surround.ctypes(address, scratch)

    def checked_leave(self: Crew, *rest: Any) -> None:
        team, places = self.team, range(MEMBERS, MEMBERS + self.num_threads * MEMBER_WORDS, MEMBER_WORDS)
        rooms = [team._words[place + SCRATCH] for place in places]
        try:
            for address in rooms:
                _check(address, self._scratch, "a call", "scratch")
            guard.check_states()
        finally:
            leave(self, *rest)

    with ExitStack() as stack:
        stack.callback(lambda: [setattr(team, "_room", -1) for team in teams])  # else rooms are too small
        for patched in (
            patch.object(Kernel, "__call__", checked_call),
            patch.object(Crew, "__exit__", checked_leave),
            patch.object(Team, "prepare", surrounded),
            patch.object(Eager, "empty", lambda self, *shape, **named: guard.empty(*shape, **named)),
            *(_in_steps(guard) if engines else ()),
        ):
            stack.enter_context(patched)
        GUARDS.append(guard)
        stack.callback(GUARDS.pop)
        yield


class _Torch:
    """torch, but tensors that it makes lie between red zones."""

    def __init__(self, guard: Guard) -> None:
        self.empty = guard.empty

        def zeros(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return guard.zeros(torch.Size(shape if isinstance(shape[0], int) else shape[0]), dtype, device)

        self.zeros = zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _in_steps(guard: Guard) -> Iterator[Any]:
    """Patches of what makes a recorded step, and the tensors that it is given."""
    init = steps.RecordedStep.__init__

    def always_poisoned(
        self: steps.RecordedStep, code: Any, inputs: list[str], poisoned: bool = True
    ) -> None:
        init(self, code, inputs, True)

    yield patch.object(steps.RecordedStep, "__init__", always_poisoned)
    yield patch.object(steps, "_poisoned", _checked)
    yield patch.object(steps, "_plan", _plan)
    yield patch.object(memory, "_zeros", guard.zeros)
    for module in (lower, recorded, ledger):
        yield patch.object(module, "torch", _Torch(guard))
    yield patch.object(recorded, "array", guard.array)


def _checked(calls: list[KernelCall]) -> list[KernelCall]:
    """With calls around each that mark its scratch and its fresh results, and look at their zones."""
    seen: set[Buffer] = set()
    found = []
    for call in calls:
        views = {value.buffer: value for value in call.arguments if isinstance(value, View)}
        wholes = [
            View(v.code, b, (), (), v.dtype) for b, v in views.items() if b.line_bytes and b.tensor is None
        ]
        for whole in wholes:
            if whole.buffer not in seen:
                seen.add(whole.buffer)
                kernel = poison if whole.buffer.input else _begin
                found.append(_of(kernel, whole.buffer.lead, whole.buffer.line_bytes, whole))
        found += [_of(_begin_call, call.scratch, scratch=call.scratch), call]
        text = f"{call.kernel.name} writes byte {{0}} of {{1}} bytes of "
        for whole in wholes:
            if not whole.buffer.input:
                fault = Fault(Case(AssertionError, text + "a result"))
                found.append(_of(_end, whole.buffer.lead, whole.buffer.line_bytes, whole, fault))
        fault = Fault(Case(AssertionError, text + "scratch"))
        found.append(_of(_end_call, call.scratch, fault, scratch=call.scratch))
    return found


def _of(kernel: Kernel, *arguments: Any, scratch: int = 0) -> KernelCall:
    """One item."""
    kernel.check_count(arguments)
    return KernelCall(kernel, 1, 0, arguments, scratch)


def _plan(calls: list[KernelCall]) -> tuple[dict[Buffer, Number], Number]:
    """Every result in memory of its own, with zones before and behind it."""
    by_lead: dict[Number, list[Buffer]] = {}
    for buffer in steps._lives(calls):
        by_lead.setdefault(buffer.lead, []).append(buffer)
    places: dict[Buffer, Number] = {}
    end: Number = ZONE
    for lead, buffers in by_lead.items():
        width = 0
        for n, buffer in enumerate(buffers):
            places[buffer] = FreeSize(steps.ARENA) + end + lead * width + n * ZONE
            width += steps._room(buffer)
        end = lead * width + end + len(buffers) * ZONE
    return places, end + SPARE
