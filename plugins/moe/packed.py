"""What mixtures of experts with packed weights share on CUDA: pairs as in cuda.py, whoever multiplies."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.groups import Layout
from hemiola.plugins.moe.cuda import combine, sort_pairs
from hemiola.plugins.moe.spec import ACTIVATIONS


class Chosen(NamedTuple):
    """A step's experts."""

    ids: torch.Tensor  # [T, K] int32
    weights: torch.Tensor  # [T, K] fp32
    pairs: torch.Tensor
    tiles: torch.Tensor


# Inputs, a weight, its layout and outputs, where these go, the experts, activation, tile.
Multiply = Callable[[torch.Tensor, torch.Tensor, Layout, int, torch.Tensor, Chosen, str, Tile], None]


def of_experts(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K] fp32
    up: torch.Tensor,  # packed [E, J, F]
    down: torch.Tensor,  # packed [E, F, I]
    activation: str,
    inner: int,  # I
    layouts: tuple[Layout, Layout],
    tile_for: Callable[[int], Tile],  # so many pairs
    multiply: Multiply,
) -> torch.Tensor:  # [T, F]
    """An expert's two layers: up (with an activation) gathers tokens, down scatters what it weighs."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"moe: activation is {activation!r}, expected relu2 or swiglu")
    check("moe", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    (num_tokens, width), num_experts = x.shape, up.shape[0]
    check("moe", "expert_ids", expert_ids, (num_tokens, None), torch.int32, x.device)
    shape = (num_tokens, expert_ids.shape[1])
    check("moe", "expert_weights", expert_weights, shape, torch.float32, x.device, anywhere=True)
    check("moe", "down", down, (num_experts, None), torch.uint8, x.device)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    num_pairs = expert_ids.numel()
    tile = tile_for(num_pairs)
    chosen = Chosen(expert_ids, expert_weights, *sort_pairs(expert_ids, num_experts, tile.tokens))
    hidden = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    multiply(x, up, layouts[0], inner * ACTIVATIONS[activation], hidden, chosen, activation, tile)
    multiply(hidden, down, layouts[1], width, out, chosen, "none", tile)
    combine(out, expert_ids, y, num_experts)
    return y
