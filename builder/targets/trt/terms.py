"""Sizes that remember how they were made of a step's sizes, and what they are for another step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hemiola.plugins.gpu.launch import cdiv


class Term(NamedTuple):
    """How a number is made: `size` of a letter, or of two numbers a sum, product, ...

    `negative` stands only inside of `-(-a // b)`, which is a `ceil_div`.
    """

    kind: str  # size, sum, difference, product, floor_div, ceil_div, negative
    parts: tuple[Any, ...]


Number = int | Term


class Dim(int):
    """A size in the largest step, and how it is made in others. Comparing is of the largest step."""

    term: Term

    def __new__(cls, value: int, term: Term) -> "Dim":
        made = super().__new__(cls, value)
        made.term = term
        return made

    @staticmethod
    def of(letter: str, value: int) -> "Dim":
        return Dim(value, Term("size", (letter,)))

    def __add__(self, other: int) -> "Dim":
        return Dim(int(self) + int(other), Term("sum", (self.term, number(other))))

    def __radd__(self, other: int) -> "Dim":
        return self + other

    def __sub__(self, other: int) -> "Dim":
        return Dim(int(self) - int(other), Term("difference", (self.term, number(other))))

    def __rsub__(self, other: int) -> "Dim":
        return Dim(int(other) - int(self), Term("difference", (number(other), self.term)))

    def __mul__(self, other: int) -> "Dim":
        if type(other) is int and other == 1:
            return self
        return Dim(int(self) * int(other), Term("product", (self.term, number(other))))

    def __rmul__(self, other: int) -> "Dim":
        return self * other

    def __floordiv__(self, other: int) -> "Dim":
        if other == 1:
            return self
        return Dim(int(self) // int(other), Term("floor_div", (self.term, number(other))))

    def __neg__(self) -> "Dim":
        kind, parts = self.term
        if kind == "floor_div" and parts[0].kind == "negative":
            return Dim(-int(self), Term("ceil_div", (parts[0].parts[0], parts[1])))
        return Dim(-int(self), Term("negative", (self.term,)))


def number(value: int) -> Number:
    return value.term if isinstance(value, Dim) else int(value)


def letters_of(value: Number) -> set[str]:
    """The sizes that it is made of."""
    if not isinstance(value, Term):
        return set()
    return {value.parts[0]} if value.kind == "size" else set().union(*map(letters_of, value.parts))


def places_of(shape: Sequence[Number]) -> dict[str, int]:
    """The dimension that is a letter's size."""
    return {
        size.parts[0]: i for i, size in enumerate(shape) if isinstance(size, Term) and size.kind == "size"
    }


def evaluate(
    value: Number,
    sizes: Mapping[str, Any],
    constant: Callable[[int], Any] = int,
    ceil_div: Callable[[Any, Any], Any] = cdiv,
) -> Any:
    """For a step's sizes by letter: ints, or a compiler's expressions, of which these make others."""
    if not isinstance(value, Term):
        return constant(value)
    if value.kind == "size":
        return sizes[value.parts[0]]
    a, b = (evaluate(part, sizes, constant, ceil_div) for part in value.parts)
    match value.kind:
        case "sum":
            return a + b
        case "difference":
            return a - b
        case "product":
            return a * b
        case "floor_div":
            return a // b
        case "ceil_div":
            return ceil_div(a, b)
    raise AssertionError(value)
