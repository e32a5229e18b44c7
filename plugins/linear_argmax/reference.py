"""The best of a dense layer's outputs."""

import torch

from hemiola.plugins.linear.reference import linear


def linear_argmax(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
) -> tuple[torch.Tensor, torch.Tensor]:  # [T] fp32, [T] int64
    """The highest output of every token, rounded to x's dtype, and the lowest one that has it.

    Where an output is NaN or infinite, so is the highest; which one it is then, is not said.
    """
    y = linear(x, weight, bias).float()
    y = torch.where(y.isnan(), torch.inf, y)
    return y.amax(1), y.argmax(1)
