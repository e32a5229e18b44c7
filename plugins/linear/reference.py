"""The dense layer, one token at a time."""

import torch


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
) -> torch.Tensor:  # [T, O]
    """y = W x + b for every token, summed in fp32 (float64 for float64 inputs), in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=wide)
    for t in range(x.shape[0]):
        y[t] = weight.to(wide) @ x[t].to(wide)
        if bias.numel():
            y[t] += bias.to(wide)
    return y.to(x.dtype)
