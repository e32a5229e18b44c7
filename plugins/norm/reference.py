"""RMS norm over groups of channels, one token and one group at a time."""

import torch


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W], final: a zero-centred norm stores 1 + w
    eps: float,
    group_len: int,  # channels that share one mean, divides W
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """x / sqrt(mean(x^2) + eps) per group, times weight; in fp32 (float64 for float64), in x's dtype.

    A gate multiplies as silu(gate): before the norm where gate_first (Mamba2's gated norm, NemotronH), else
    after the weight (Gated DeltaNet, Qwen3-Next). RMS norm: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    for t in range(x.shape[0]):
        token = x[t].to(wide)
        if gate.numel() and gate_first:
            token = token * silu(gate[t].to(wide))
        for start in range(0, x.shape[1], group_len):
            group = token[start : start + group_len]
            y[t, start : start + group_len] = group / torch.sqrt((group * group).mean() + eps)
        y[t] *= weight.to(wide)
        if gate.numel() and not gate_first:
            y[t] *= silu(gate[t].to(wide))
    return y.to(x.dtype)


def silu(z: torch.Tensor) -> torch.Tensor:
    """z * sigmoid(z)."""
    return z / (1 + torch.exp(-z))
