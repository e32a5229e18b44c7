"""A mixture of experts, grouped by expert: all up GEMMs, one activation, all down GEMMs, one combine.

Every expert's tokens stand together in one buffer. In exact numerics an expert's part is padded to tiles
of the exact dense layer (plugins/linear/cpu.py).
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hemiola.plugins.linear.cpu import MIN_ROWS, dense
from hemiola.plugins.norm.cpu import silu


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K]
    up: torch.Tensor,  # [E, J, F]
    down: torch.Tensor,  # [E, F, I]
    activation: str,
    exact: bool,
) -> torch.Tensor:  # [T, F]
    """See reference.py. exact: a token's bits (fp32) depend only on it, its experts and weights."""
    if activation not in ("relu2", "swiglu"):
        raise ValueError(f"moe: activation is {activation!r}, expected relu2 or swiglu")
    num_tokens, num_slots = expert_ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = group_by_expert(expert_ids.numpy(), MIN_ROWS if exact else 1)
    hidden = x.to(wide).index_select(0, torch.from_numpy(groups.tokens))
    hidden = matmuls(hidden, up, groups, exact)
    hidden = activate(hidden, activation)
    hidden = matmuls(hidden, down, groups, exact)
    parts = hidden.index_select(0, torch.from_numpy(groups.places)).view(num_tokens, num_slots, -1)
    parts *= expert_weights.unsqueeze(2)
    y = parts[:, 0]
    for slot in range(1, num_slots):
        y = y + parts[:, slot]
    return y.to(x.dtype).contiguous()


class Groups(NamedTuple):
    """Where the T * K (token, slot) pairs stand in a buffer ordered by expert."""

    experts: list[int]  # the used ones, ascending
    counts: list[int]  # rows of each, padding included
    tokens: np.ndarray  # [buffer rows] int64: the token in each row; padding repeats token 0
    places: np.ndarray  # [T * K] int64: the row of each pair


def group_by_expert(expert_ids: np.ndarray, tile: int) -> Groups:
    """The pairs of expert_ids [T, K] by expert, every expert's part padded to a multiple of `tile` rows."""
    flat = expert_ids.ravel()
    if len(expert_ids) == 1:
        size = flat.size * tile
        return Groups(flat.tolist(), [tile] * flat.size, np.zeros(size, np.int64), np.arange(0, size, tile))
    order = flat.argsort(kind="stable")
    counts = np.bincount(flat)
    experts = counts.nonzero()[0]
    counts = counts[experts]
    padded = -(-counts // tile) * tile
    shift = (padded - counts).cumsum() - (padded - counts)  # padding rows before an expert's part
    rows = np.arange(flat.size) + shift.repeat(counts)
    tokens = np.zeros(padded.sum(), np.int64)
    tokens[rows] = order // expert_ids.shape[1]
    places = np.empty(flat.size, np.int64)
    places[order] = rows
    return Groups(experts.tolist(), padded.tolist(), tokens, places)


def matmuls(x: torch.Tensor, weight: torch.Tensor, groups: Groups, exact: bool) -> torch.Tensor:
    """Every expert's rows of x [rows, F] times its weight of [E, O, F]: [rows, O]."""
    multiply = dense if exact else F.linear
    parts = x.split(groups.counts)
    results = [
        multiply(part, weight[expert].to(x.dtype)) for part, expert in zip(parts, groups.experts, strict=True)
    ]
    return torch.cat(results)


def activate(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """[rows, J] -> [rows, I], elementwise with the same bits wherever an element stands."""
    if activation == "relu2":
        return hidden.relu_().square_()
    gate, value = hidden.chunk(2, dim=1)
    return silu(gate).mul_(value)
