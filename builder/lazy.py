"""Tensors that stay on disk until they are needed: plain ones, and quantised weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hemiola.builder.formats.module import Found
from hemiola.plugins.groups import Layout, WeightGroup, dequantised, joined
from hemiola.plugins.spec import Pack


@dataclass(frozen=True)
class Lazy:
    """A tensor that is not in memory: its shape and dtype are known, `read()` makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    std: float | None = None  # of normal numbers that stand for the weight (random_weights.py)
    found: Found | None = None  # a quantised weight; `read()` makes its numbers in fp32

    @staticmethod
    def of(tensor: torch.Tensor) -> "Lazy":
        return Lazy(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @staticmethod
    def quantised(shape: tuple[int, ...], found: Found) -> "Lazy":
        return Lazy(shape, torch.float32, lambda: dequantised(found.read()), found=found)

    @property
    def layout(self) -> Layout | None:
        """Of a quantised weight."""
        return None if self.found is None else self.found.layout

    def take(self, order: Callable[[torch.Tensor], torch.Tensor]) -> "Lazy":
        """The rows whose numbers `order` makes of the numbers of all."""
        rows = order(torch.arange(self.shape[0]))

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows.to(tensor.device)]

        found = self.found
        if found is None:
            return self.map(pick)
        shape = (len(rows), *self.shape[1:])
        return Lazy.quantised(shape, Found(found.layout, lambda: found.read().map(pick)))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Lazy":
        """`function` of this tensor, applied when it is read."""
        assert self.found is None, "a quantised weight is changed by rows alone"
        result = function(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        return Lazy(tuple(result.shape), result.dtype, lambda: function(self.read()), self.std)

    def packed(self, pack: Pack) -> "Lazy":
        """In the layout that a form asks for."""
        found = self.found
        if found is None:
            return self.map(pack)
        result = pack(WeightGroup.empty(found.layout, self.shape))
        return Lazy(tuple(result.shape), result.dtype, lambda: pack(found.read()))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def join(parts: list[Lazy], function: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat) -> Lazy:
    """Several tensors as one, along the first dimension, in the smallest dtype that holds them all; quantised
    ones of one layout."""
    assert len({part.layout for part in parts}) == 1
    empty = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts]
    dtype = empty[0].dtype
    for tensor in empty:
        dtype = torch.promote_types(dtype, tensor.dtype)
    shape = function(empty).shape
    if parts[0].found is not None:
        groups = [part.found for part in parts if part.found is not None]
        return Lazy.quantised(
            tuple(shape), Found(groups[0].layout, lambda: joined([g.read() for g in groups], function))
        )
    return Lazy(tuple(shape), dtype, lambda: function([p.read().to(dtype) for p in parts]), parts[0].std)


def stacked(parts: Iterable[Lazy]) -> Lazy:
    """Tensors of one shape along a new first dimension."""
    return join(list(parts), torch.stack)
