"""The dense layer and what follows it, one token at a time."""

import torch

ACTIVATIONS = ("none", "relu2", "swiglu")
EIGHT = 8  # outputs of a kind that stand together


def fused_linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]; with swiglu eight gates, the eight values that they open, and so on
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor,  # [T, D], or zero-length: none
    activation: str,
    width: int,  # D: O, or half of it with swiglu
) -> torch.Tensor:  # [T, D]
    """residual + activation(W x + b) for every token, in fp32 (float64 for float64) until the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape[0], width, dtype=wide)
    for t in range(x.shape[0]):
        line = weight.to(wide) @ x[t].to(wide)
        if bias.numel():
            line += bias.to(wide)
        if activation == "relu2":
            line = line.relu().square()
        if activation == "swiglu":
            gate, value = line.view(-1, 2, EIGHT).transpose(0, 1).flatten(1)
            line = gate / (1 + torch.exp(-gate)) * value
        y[t] = line
        if residual.dim() == 2:
            y[t] += residual[t].to(wide)
    return y.to(x.dtype)
