"""The dense layer and what follows it, on CUDA: the dense layer's kernels end so (plugins/linear)."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.checks import absent
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.linear.cuda import every_tile, fused


def fused_linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor,  # [T, D], or zero-length: none
    activation: str,
    width: int,  # D
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, D]
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    return fused(x, weight, bias, None if absent(residual) else residual, activation, tile)


def variants(
    most: Size,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    activation: str,
    width: int,
) -> Iterator[Variant]:
    described = [x, weight, x.new_empty(len(x), width)]
    yield from every_tile(most, len(weight), *described, *([] if absent(residual) else [residual]))
