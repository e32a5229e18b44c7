"""A gate on every channel, on CUDA."""

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_gate = Kernel("gate", "_gate")

BLOCK = 2048  # channels of a program


def gate(
    x: torch.Tensor,  # [T, E]
    gate: torch.Tensor,  # [T, J], J = E or 1: one gate for all channels
    kind: str,
) -> torch.Tensor:  # [T, E]
    """See reference.py. Lines of x and gate may lie apart."""
    if kind not in ("silu", "sigmoid"):
        raise ValueError(f"gate: kind is {kind!r}, expected silu or sigmoid")
    check("gate", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    num_tokens, width = x.shape
    is_single = gate.dim() == 2 and gate.shape[1] == 1
    shape = (num_tokens, 1 if is_single else width)
    check("gate", "gate", gate, shape, FLOATS, x.device, apart=1, anywhere=True)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block = min(BLOCK, pow2(width))
        _gate[num_tokens, cdiv(width, block)](
            x, gate, y, x.stride(0), gate.stride(0), width,
            BLOCK=block, SINGLE=is_single, SILU=kind == "silu", num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
