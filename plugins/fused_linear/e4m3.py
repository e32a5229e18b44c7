"""The dense layer and what follows it, on CUDA with inputs and weights in e4m3 (plugins/linear/e4m3.py)."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.checks import absent
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.e4m3 import every_tile, fused


def fused_linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # pack_lines([O, F])
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor,  # [T, D], or zero-length: none
    activation: str,
    width: int,  # D
    num_outputs: int,  # O
    weight_layout: Layout,
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, D]
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    added = None if absent(residual) else residual
    return fused(x, weight, bias, added, activation, num_outputs, weight_layout, tile)


def variants(
    most: Size,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    activation: str,
    width: int,
    num_outputs: int,
) -> Iterator[Variant]:
    yield from every_tile(most, x)
