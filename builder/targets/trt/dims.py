"""Sizes that remember how they were made of a step's sizes (plugins/sizes.py), for a run of a launcher."""

from collections.abc import Sequence

from hemiola.plugins.sizes import CEIL_DIV, FLOOR_DIV, MUL, FreeSize, Number


class Dim(int):
    """A size in the largest step, and how it is made in others. Comparing is of the largest step."""

    size: FreeSize

    def __new__(cls, value: int, size: FreeSize) -> "Dim":
        made = super().__new__(cls, value)
        made.size = size
        return made

    @staticmethod
    def of(letter: str, value: int) -> "Dim":
        return Dim(value, FreeSize(letter))

    def __add__(self, other: int) -> "Dim":
        return Dim(int(self) + int(other), self.size + number(other))

    def __sub__(self, other: int) -> "Dim":
        return Dim(int(self) - int(other), self.size - number(other))

    def __rsub__(self, other: int) -> "Dim":
        return Dim(int(other) - int(self), number(other) - self.size)

    def __mul__(self, other: int) -> "Dim":
        return Dim(int(self) * int(other), self.size * number(other))

    def __floordiv__(self, other: int) -> "Dim":
        return Dim(int(self) // int(other), self.size // number(other))

    def __neg__(self) -> "Dim":
        """Stands only inside of `-(-a // b)`, which is a division that rounds up."""
        size = self.size
        part = size.a if size.operation == FLOOR_DIV else 0
        if isinstance(part, FreeSize) and (part.operation, part.b) == (MUL, -1):
            return Dim(-int(self), FreeSize("", CEIL_DIV, part.a, size.b))
        return Dim(-int(self), size * -1)

    __radd__, __rmul__ = __add__, __mul__


def number(value: int) -> Number:
    return value.size if isinstance(value, Dim) else int(value)


def places_of(shape: Sequence[Number]) -> dict[str, int]:
    """The dimension that is a letter's size."""
    return {size.name: i for i, size in enumerate(shape) if isinstance(size, FreeSize) and size.name}
