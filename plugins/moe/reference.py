"""A mixture of experts, one token and one of its experts at a time."""

import torch
import torch.nn.functional as F

from hemiola.plugins.groups import WeightGroup
from hemiola.plugins.inputs import product


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32, the experts that the router chose for a token
    expert_weights: torch.Tensor,  # [T, K], their final weights
    up: torch.Tensor,  # [E, J, F], J = I or 2I
    down: torch.Tensor,  # [E, F, I]
    activation: str,
) -> torch.Tensor:  # [T, F]
    """y = sum over slots k = 0..K-1, in that order, of weight_k * expert_k(x), in fp32 (float64 for float64).

    An expert is down @ relu(up @ x)^2 ("relu2": Nemotron) or down @ (silu(gate) * value) with [gate; value] =
    up @ x ("swiglu": Shazeer 2020, arXiv 2002.05202).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    for t in range(x.shape[0]):
        for expert, weight in zip(expert_ids[t].tolist(), expert_weights[t], strict=True):
            hidden = up[expert].to(wide) @ x[t].to(wide)
            y[t] += weight * (down[expert].to(wide) @ activate(hidden, activation))
    return y.to(x.dtype)


def moe_e4m3(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K]
    up: WeightGroup,  # [E, J, F], whose layout says how inputs are rounded
    down: WeightGroup,  # [E, F, I]
    activation: str,
) -> torch.Tensor:  # [T, F]
    """The same of inputs in e4m3, of both layers of an expert; plugins/inputs.py fixes the order of sums."""
    y = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for expert, weight in zip(expert_ids[t].tolist(), expert_weights[t], strict=True):
            ours, theirs = (group.map(lambda tensor, e=expert: tensor[e]) for group in (up, down))
            hidden = activate(product(x[t : t + 1], ours)[0], activation)
            y[t] += weight * product(hidden[None], theirs)[0]
    return y.to(x.dtype)


def activate(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """[J] -> [I]."""
    if activation == "relu2":
        return F.relu(hidden) ** 2
    if activation == "swiglu":
        gate, value = hidden.chunk(2)
        return F.silu(gate) * value
    raise ValueError(f"moe: activation is {activation!r}, expected relu2 or swiglu")
