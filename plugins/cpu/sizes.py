"""Numbers of a step (plugins/sizes.py) in the order in which compiled code computes them."""

from typing import NamedTuple

import numpy as np

from hemiola.plugins.sizes import FreeSize, Number


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
