"""The algebra of sizes: numbers of a step as expressions of its tokens, rows, pages and logits.

What is computed from a shape works on plain integers and on expressions alike. A CPU's recording evaluates
them when a step begins (cpu/sizes.py), TensorRT when it launches a kernel (builder/targets/trt/dims.py).
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

Number = Union[int, "FreeSize"]
ADD, SUB, MUL, FLOOR_DIV, CEIL_DIV, MIN, MAX, SCALE = range(8)
PARTS = 1024  # of a unit, in which SCALE counts


@dataclass(frozen=True)
class FreeSize:
    """An input by name, or what an operation makes of two numbers."""

    name: str = ""
    operation: int = -1
    a: Number = 0
    b: Number = 0

    def __add__(self, other: Number | float) -> "FreeSize":
        other = round(other) if isinstance(other, float) else other
        return self if other == 0 else FreeSize("", ADD, self, other)

    def __sub__(self, other: Number) -> "FreeSize":
        return self if other == 0 else FreeSize("", SUB, self, other)

    def __rsub__(self, other: Number) -> "FreeSize":
        return FreeSize("", SUB, other, self)

    def __mul__(self, other: Number | float) -> "FreeSize":
        if isinstance(other, float):
            return FreeSize("", SCALE, self, round(other * PARTS))
        return self if other == 1 else FreeSize("", MUL, self, other)

    def __floordiv__(self, other: Number) -> "FreeSize":
        return self if other == 1 else FreeSize("", FLOOR_DIV, self, other)

    __radd__, __rmul__ = __add__, __mul__


def ceil_div(a: Number, b: Number) -> Number:
    """a / b, rounded up; b is at least 1."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return a if b == 1 else FreeSize("", CEIL_DIV, a, b)


def least(a: Number, b: Number) -> Number:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else FreeSize("", MIN, a, b)


def most(a: Number, b: Number) -> Number:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else FreeSize("", MAX, a, b)


OPERATIONS: dict[int, Callable[[Any, Any], Any]] = {
    ADD: operator.add,
    SUB: operator.sub,
    MUL: operator.mul,
    FLOOR_DIV: operator.floordiv,
    CEIL_DIV: ceil_div,
    MIN: min,
    MAX: max,
    SCALE: lambda a, b: a * b // PARTS,
}


def names_of(number: Number) -> tuple[str, ...]:
    """The inputs that it depends on."""
    if isinstance(number, int):
        return ()
    if number.name:
        return (number.name,)
    return tuple(dict.fromkeys(names_of(number.a) + names_of(number.b)))


def evaluate(
    number: Number,
    inputs: Mapping[str, Any],
    constant: Callable[[int], Any] = int,
    operations: Mapping[int, Callable[[Any, Any], Any]] = OPERATIONS,
) -> Any:
    """Of inputs that are ints, or expressions of a compiler's with constants and operations of its own."""
    if isinstance(number, int):
        return constant(number)
    if number.name:
        return inputs[number.name]
    a, b = (evaluate(part, inputs, constant, operations) for part in (number.a, number.b))
    return operations[number.operation](a, b)
