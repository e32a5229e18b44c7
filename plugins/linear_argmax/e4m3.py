"""The best of a dense layer's outputs, on CUDA with inputs and weights in e4m3 (plugins/linear/e4m3.py)."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.e4m3 import best, every_tile


def linear_argmax(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # pack_lines([O, F])
    bias: torch.Tensor,  # [O], or zero-length: none
    num_outputs: int,  # O
    weight_layout: Layout,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T] fp32, [T] int64
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    return best(x, weight, bias, num_outputs, weight_layout, tile)


def variants(
    most: Size, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_outputs: int
) -> Iterator[Variant]:
    yield from every_tile(most, x, is_stored=False)
