"""RMS norm over groups of channels, on CUDA: one fixed tree of sums per group."""

import torch
import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import silu
from hemiola.plugins.gpu.checks import absent, aligned, check
from hemiola.plugins.gpu.dtypes import FLOATS

TILE = 2048  # channels of a program, where groups are shorter


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """See reference.py. Lines of x and gate may lie apart."""
    check("norm", "x", x, (None, None), FLOATS, x.device)
    num_tokens, width = x.shape
    check("norm", "weight", weight, (width,), FLOATS, x.device)
    if group_len <= 0 or width % group_len:
        raise ValueError(f"norm: groups of {group_len} channels do not divide {width}")
    is_gated = not absent(gate)
    if is_gated:
        check("norm", "gate", gate, (num_tokens, width), FLOATS, x.device)
        gate = aligned(gate)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        lanes = triton.next_power_of_2(group_len)
        groups = max(1, min(triton.next_power_of_2(width // group_len), TILE // lanes))
        x = aligned(x)
        _norm[num_tokens, triton.cdiv(width // group_len, groups)](
            x, gate if is_gated else x, weight, y, x.stride(0), gate.stride(0) if is_gated else 0, width, eps,
            GROUP_LEN=group_len, LANES=lanes, GROUPS=groups, GATED=is_gated, GATE_FIRST=gate_first,
            num_warps=max(1, min(8, groups * lanes // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit
def _norm(x, gate, weight, y, x_len, gate_len, width, eps, GROUP_LEN: tl.constexpr, LANES: tl.constexpr,
          GROUPS: tl.constexpr, GATED: tl.constexpr, GATE_FIRST: tl.constexpr):  # fmt: skip
    # Grid: tokens x blocks of GROUPS groups.
    # Tile: [GROUPS, LANES], summed along the second axis.
    # Traffic: x, gate and weight once, y once.
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    at = group * GROUP_LEN + lane
    inside = (lane < GROUP_LEN) & (at < width)
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        opening = silu(tl.load(gate + token * gate_len + at, mask=inside, other=0.0).to(tl.float32))
        if GATE_FIRST:
            value = value * opening
    square = tl.sum(value * value, axis=1, keep_dims=True) / GROUP_LEN
    value = value * tl.div_rn(1.0, tl.sqrt_rn(square + eps))
    value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if GATED and not GATE_FIRST:
        value = value * opening
    tl.store(y + token * width + at, value.to(y.dtype.element_ty), mask=inside)
