"""Sizes that are known when a step begins: numbers as expressions of its tokens, rows, pages and logits.

What a form computes from a shape works on plain integers and on these alike.
"""

import operator
from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np

Number = Union[int, "FreeSize"]
ADD, MUL, FLOOR_DIV, MIN, MAX, SCALE = range(6)
PARTS = 1024  # of a unit, in which SCALE counts
OPERATIONS = (operator.add, operator.mul, operator.floordiv, min, max, lambda a, b: a * b // PARTS)


@dataclass(frozen=True)
class FreeSize:
    """An input of the step by name, or what an operation makes of two numbers."""

    name: str = ""
    operation: int = -1
    a: Number = 0
    b: Number = 0

    def __add__(self, other: Number | float) -> Number:
        other = round(other) if isinstance(other, float) else other
        return self if other == 0 else FreeSize("", ADD, self, other)

    def __mul__(self, other: Number | float) -> Number:
        if isinstance(other, float):
            return FreeSize("", SCALE, self, round(other * PARTS))
        return self if other == 1 else FreeSize("", MUL, self, other)

    def __floordiv__(self, other: int) -> Number:
        return self if other == 1 else FreeSize("", FLOOR_DIV, self, other)

    __radd__, __rmul__ = __add__, __mul__


def ceil_div(a: Number, b: Number) -> Number:
    """a / b, rounded up; b is at least 1."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return FreeSize("", FLOOR_DIV, b + -1 + a, b)


def least(a: Number, b: Number) -> Number:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else FreeSize("", MIN, a, b)


def most(a: Number, b: Number) -> Number:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else FreeSize("", MAX, a, b)


class Formulas(NamedTuple):
    """Numbers of a step in the order in which they are computed: inputs first, then constants and results."""

    inputs: list[str]
    values: np.ndarray  # int64, one per number; constants are filled in
    operations: np.ndarray  # [n, 4] int64: operation, a, b and the place of the result


class Builder:
    """Gives every number a place; equal expressions share theirs."""

    def __init__(self, inputs: list[str]) -> None:
        self.inputs = inputs
        self._places: dict[Number, int] = {FreeSize(name): n for n, name in enumerate(inputs)}
        self._constants: dict[int, int] = {}
        self._operations: list[tuple[int, int, int, int]] = []

    def place(self, number: Number) -> int:
        """Where the number will stand among the values."""
        if number in self._places:
            return self._places[number]
        if isinstance(number, int):
            place = self._places[number] = len(self._places)
            self._constants[place] = number
            return place
        assert number.operation >= 0, f"{number.name!r} is no input of the step"
        a, b = self.place(number.a), self.place(number.b)
        place = self._places[number] = len(self._places)
        self._operations.append((number.operation, a, b, place))
        return place

    def finish(self) -> Formulas:
        values = np.zeros(len(self._places), np.int64)
        for place, constant in self._constants.items():
            values[place] = constant
        return Formulas(self.inputs, values, np.array(self._operations, np.int64).reshape(-1, 4))


def names_of(number: Number) -> tuple[str, ...]:
    """The inputs that it depends on."""
    if isinstance(number, int):
        return ()
    if number.name:
        return (number.name,)
    return tuple(dict.fromkeys(names_of(number.a) + names_of(number.b)))


def evaluate(number: Number, inputs: dict[str, int]) -> int:
    """The same in Python."""
    if isinstance(number, int):
        return number
    if number.name:
        return inputs[number.name]
    a, b = evaluate(number.a, inputs), evaluate(number.b, inputs)
    return OPERATIONS[number.operation](a, b)
