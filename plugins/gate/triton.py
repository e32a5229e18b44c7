"""A gate on every channel, on CUDA."""

import torch
import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import sigmoid, silu
from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS

BLOCK = 2048  # channels of a program


def gate(
    x: torch.Tensor,  # [T, E]
    gate: torch.Tensor,  # [T, J], J = E or 1: one gate for all channels
    kind: str,
) -> torch.Tensor:  # [T, E]
    """See reference.py. Lines of x and gate may lie apart."""
    if kind not in ("silu", "sigmoid"):
        raise ValueError(f"gate: kind is {kind!r}, expected silu or sigmoid")
    check("gate", "x", x, (None, None), FLOATS, x.device)
    num_tokens, width = x.shape
    is_single = gate.dim() == 2 and gate.shape[1] == 1
    check("gate", "gate", gate, (num_tokens, 1 if is_single else width), FLOATS, x.device)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _gate[num_tokens, triton.cdiv(width, block)](
            x, gate, y, x.stride(0), gate.stride(0), width,
            BLOCK=block, SINGLE=is_single, SILU=kind == "silu", num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit
def _gate(x, gate, y, x_len, gate_len, width, BLOCK: tl.constexpr, SINGLE: tl.constexpr, SILU: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of one token.
    # Traffic: x and gate once, y once.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0).to(tl.float32)
    if SINGLE:
        opening = tl.load(gate + token * gate_len).to(tl.float32)
    else:
        opening = tl.load(gate + token * gate_len + at, mask=inside, other=0.0).to(tl.float32)
    factor = silu(opening) if SILU else sigmoid(opening)
    tl.store(y + token * width + at, (value * factor).to(y.dtype.element_ty), mask=inside)
