"""The best of a dense layer's outputs, on CUDA: of each tile, then of all (plugins/linear)."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.linear.cuda import best, every_tile


def linear_argmax(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T] fp32, [T] int64
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    return best(x, weight, bias, tile)


def variants(most: Size, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Iterator[Variant]:
    yield from every_tile(most, len(weight), x, weight, is_stored=False)
