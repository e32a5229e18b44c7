"""The dense layer, one token at a time."""

from typing import Any

import torch

from hemiola.plugins.groups import WeightGroup
from hemiola.plugins.inputs import product

EIGHT = 8  # gates that stand together, before the values that they open


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]; with swiglu eight gates, the eight values that they open, and so on
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor | None = None,  # [T, O]
    ending: str = "",
) -> Any:  # [T, O]; with swiglu [T, O / 2]; with argmax [T] fp32, [T] int64
    """residual + W x + b for every token, or what it ends as, in fp32 (float64 for float64), rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=wide)
    for t in range(x.shape[0]):
        y[t] = weight.to(wide) @ x[t].to(wide)
        if bias.numel():
            y[t] += bias.to(wide)
    match ending:
        case "relu2":
            y = y.relu().square()
        case "swiglu":
            gate, value = (half.flatten(1) for half in y.unflatten(1, (-1, 2, EIGHT)).unbind(2))
            y = gate / (1 + torch.exp(-gate)) * value
        case "argmax":
            return best(y.to(x.dtype))
    return (y if residual is None else y + residual.to(wide)).to(x.dtype)


def best(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest output of every token, and the lowest one that has it.

    Where an output is NaN or infinite, so is the highest; which one it is then, is not said.
    """
    y = torch.where(y.isnan(), torch.inf, y.float())
    return y.amax(1), y.argmax(1)


def linear_e4m3(
    x: torch.Tensor,  # [T, F]
    group: WeightGroup,  # [O, F], whose layout says how inputs are rounded
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor | None = None,  # [T, O]
) -> torch.Tensor:  # [T, O]
    """The same of inputs in e4m3, whose order of sums plugins/inputs.py fixes."""
    y = product(x, group)
    y = y + bias.float() if bias.numel() else y
    return (y if residual is None else y + residual.float()).to(x.dtype)
