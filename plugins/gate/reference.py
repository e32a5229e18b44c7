"""A gate on every channel, one token at a time."""

import torch


def gate(
    x: torch.Tensor,  # [T, E]
    gate: torch.Tensor,  # [T, J], J = E or 1: one gate for all channels
    kind: str,
) -> torch.Tensor:  # [T, E]
    """x * gate * sigmoid(gate) for "silu" (SwiGLU: Shazeer 2020, arXiv 2002.05202), x * sigmoid(gate) for
    "sigmoid"; in fp32 (float64 for float64), in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    for t in range(x.shape[0]):
        opening = gate[t].to(wide)
        if kind == "silu":
            y[t] = x[t].to(wide) * (opening / (1 + torch.exp(-opening)))
        elif kind == "sigmoid":
            y[t] = x[t].to(wide) / (1 + torch.exp(-opening))
        else:
            raise ValueError(f"gate: kind is {kind!r}, expected silu or sigmoid")
    return y.to(x.dtype)
