"""The dense layer, one token at a time."""

import torch

from hemiola.plugins.groups import WeightGroup
from hemiola.plugins.inputs import product


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor | None = None,  # [T, O]
) -> torch.Tensor:  # [T, O]
    """y = W x + b for every token, summed in fp32 (float64 for float64 inputs), in x's dtype; then a residual
    is added, as a sum of its own."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=wide)
    for t in range(x.shape[0]):
        y[t] = weight.to(wide) @ x[t].to(wide)
        if bias.numel():
            y[t] += bias.to(wide)
    y = y.to(x.dtype)
    return y if residual is None else y + residual


def linear_e4m3(
    x: torch.Tensor,  # [T, F]
    group: WeightGroup,  # [O, F], whose layout says how inputs are rounded
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor | None = None,  # [T, O]
) -> torch.Tensor:  # [T, O]
    """The same of inputs in e4m3, whose order of sums plugins/inputs.py fixes."""
    y = product(x, group)
    y = (y + bias.float() if bias.numel() else y).to(x.dtype)
    return y if residual is None else y + residual
