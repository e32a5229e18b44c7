"""What forms are written against: their calls are done at once on tensors, or recorded on views.

A form takes its operands as tensors or as views, asks `code_of` one of them who works for it, and makes
results (`empty`) and calls (`call`) there. Recorded code becomes a step of an engine (steps.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import put_long
from hemiola.plugins.cpu.team import usual_threads
from hemiola.plugins.sizes import FreeSize, Number

FAULT_WORDS = 10  # which case, and nine numbers


class Case(NamedTuple):
    """What a kernel may find wrong: the message may name numbers that it leaves."""

    error: type[Exception]
    message: str


class Fault:
    """Words in which a kernel says what is wrong: which case, from 1 on, and numbers; 0: nothing."""

    def __init__(self, *cases: Case) -> None:
        self.cases = cases
        self.words = torch.zeros(FAULT_WORDS, dtype=torch.int64)

    def check(self) -> None:
        """Raise what a kernel found."""
        case, *numbers = self.words.tolist()
        if case:
            self.words.zero_()
            error, message = self.cases[case - 1]
            raise error(message.format(*numbers))


@helper
def complain(fault, case, a, b):
    """In a kernel: it found this case, whose message names two numbers."""
    put_long(fault, 1, a)
    put_long(fault, 2, b)
    put_long(fault, 0, case)


@dataclass(eq=False)
class Buffer:
    """Where numbers lie: in a tensor that stays, at an address that a step is given, or in its arena."""

    tensor: torch.Tensor | None = None
    input: str = ""
    lead: Number = 0  # in the arena: the first dimension, and the bytes of one line
    line_bytes: int = 0


@dataclass(frozen=True)
class View:
    """A tensor that is not there yet."""

    code: "Recorder" = field(repr=False)
    buffer: Buffer
    shape: tuple[Any, ...]  # Numbers; type checkers would ask of which kind
    strides: tuple[Any, ...]
    dtype: torch.dtype
    offset: int = 0  # numbers

    def stride(self, dim: int) -> Any:
        return self.strides[dim]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def in_lines(self) -> bool:
        """Whether the numbers of a token lie side by side."""
        return all(
            size == 1 or stride == dense
            for size, stride, dense in zip(
                self.shape[1:], self.strides[1:], _dense([*self.shape[1:]]), strict=True
            )
        )

    def split(self, sizes: list[int], dim: int) -> list["View"]:
        parts, at = [], 0
        for size in sizes:
            shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
            parts.append(replace(self, shape=shape, offset=self.offset + at * self.strides[dim]))
            at += size
        return parts

    def unsqueeze(self, dim: int) -> "View":
        shape, strides = list(self.shape), list(self.strides)
        strides.insert(dim, strides[dim] * shape[dim] if dim < len(shape) else 1)
        shape.insert(dim, 1)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def view(self, inner: list[int]) -> "View":
        """[T, *inner] of numbers that lie side by side within a token."""
        return replace(self, shape=(self.shape[0], *inner), strides=(self.strides[0], *_dense(inner)))


Operand = Any  # torch.Tensor | View: what a form is given


class Code(Protocol):
    """Who works for a form."""

    @property
    def threads(self) -> Any: ...

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Operand: ...

    def given(self, tensor: torch.Tensor) -> Operand:
        """A tensor that stays where it is."""
        ...

    def fault(self, *cases: Case) -> Fault: ...

    def call(
        self,
        kernel: Kernel,
        num_items: Any,
        nanoseconds: Any,
        *arguments: Any,
        scratch: int = 0,
    ) -> None: ...

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` returns; calls with the same key, operands included, share it."""
        ...


class Eager:
    """Does everything at once."""

    @property
    def threads(self) -> int:
        return usual_threads()

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fault(self, *cases: Case) -> Fault:
        return Fault(*cases)

    def call(
        self, kernel: Kernel, num_items: Any, nanoseconds: Any, *arguments: Any, scratch: int = 0
    ) -> None:
        faults = [value for value in arguments if isinstance(value, Fault)]
        values = [value.words if isinstance(value, Fault) else value for value in arguments]
        kernel(num_items, nanoseconds, *values, scratch=scratch)
        for fault in faults:
            fault.check()

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        return make()


class KernelCall(NamedTuple):
    """One call of a kernel in recorded code."""

    kernel: Kernel
    num_items: Number
    nanoseconds: Number
    arguments: tuple[Any, ...]
    scratch: int


class Recorder:
    """Writes everything down."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []
        self._made: dict[tuple, Any] = {}

    @property
    def threads(self) -> FreeSize:
        return FreeSize("threads")

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> View:
        lead, *inner = shape
        assert all(isinstance(size, int) for size in inner), f"only the first of {shape} may be free"
        line_bytes = prod(inner) * dtype.itemsize
        buffer = Buffer(lead=lead, line_bytes=line_bytes)
        return View(self, buffer, shape, (prod(inner), *_dense(inner)), dtype)

    def given(self, tensor: torch.Tensor) -> View:
        return View(self, Buffer(tensor=tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def input(self, name: str, shape: tuple[Number, ...], dtype: torch.dtype) -> View:
        """A dense tensor whose address is an input of the step; only its first two dimensions may be free."""
        return View(self, Buffer(input=name), shape, _dense([*shape]), dtype)

    def fault(self, *cases: Case) -> Fault:
        return Fault(*cases)

    def call(
        self,
        kernel: Kernel,
        num_items: Any,
        nanoseconds: Any,
        *arguments: Any,
        scratch: int = 0,
    ) -> None:
        kernel.check_count(arguments)
        cost = round(nanoseconds) if isinstance(nanoseconds, float) else nanoseconds
        self.calls.append(KernelCall(kernel, num_items, cost, arguments, scratch))

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _dense(inner: list[Any]) -> tuple[Any, ...]:
    """Strides of numbers that lie side by side."""
    strides, size = [], 1
    for length in reversed(inner):
        strides.append(size)
        size = length * size
    return tuple(reversed(strides))


EAGER = Eager()


def code_of(operand: Operand) -> Code:
    return operand.code if isinstance(operand, View) else EAGER


def numel(operand: Operand) -> Any:
    size: Number = 1
    for length in operand.shape:
        size = length * size
    return size


def numbers(operand: Operand) -> Operand:
    """Integers side by side."""
    return operand.contiguous() if isinstance(operand, torch.Tensor) else operand


def lines(operand: Operand) -> Operand:
    """The tensor [T, *F], copied unless the numbers of a token lie side by side; tokens may lie apart."""
    if isinstance(operand, View):
        if not operand.in_lines:
            raise ValueError(f"the numbers of a token, {list(operand.shape[1:])}, lie apart")
        return operand
    if operand.is_contiguous() or operand[0].is_contiguous():
        return operand
    return operand.contiguous()
