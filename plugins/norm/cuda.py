"""RMS norm over groups of channels, on CUDA: one fixed tree of sums per group."""

import torch

from hemiola.plugins.gpu.checks import absent, aligned, check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_norm = Kernel("norm", "_norm")

TILE = 1024  # channels of a program, where groups are shorter


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """See reference.py. Lines of x and gate may lie apart."""
    check("norm", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    num_tokens, width = x.shape
    check("norm", "weight", weight, (width,), FLOATS, x.device, anywhere=True)
    if group_len <= 0 or width % group_len:
        raise ValueError(f"norm: groups of {group_len} channels do not divide {width}")
    is_gated = not absent(gate)
    if is_gated:
        check("norm", "gate", gate, (num_tokens, width), FLOATS, x.device, apart=1, anywhere=True)
        gate = aligned(gate)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        lanes = pow2(group_len)
        groups = max(1, min(pow2(width // group_len), TILE // lanes))
        x = aligned(x)
        _norm[num_tokens, cdiv(width // group_len, groups)](
            x, gate if is_gated else x, weight, y, x.stride(0), gate.stride(0) if is_gated else 0, width, eps,
            GROUP_LEN=group_len, LANES=lanes, GROUPS=groups, GATED=is_gated, GATE_FIRST=gate_first,
            num_warps=max(1, min(8, groups * lanes // (256 if groups > 1 else 512))), enable_fp_fusion=False,
        )  # fmt: skip
    return y
