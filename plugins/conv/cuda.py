"""The causal depthwise convolution with silu on CUDA, over the ring of raw columns and new tokens alike."""

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import every_number_of_rows

_conv = Kernel("conv", "_conv")
_keep_long = Kernel("conv", "_keep_long")
variants = every_number_of_rows

TOKENS, CHANNELS = 16, 256  # of a program


def conv(
    x: torch.Tensor,  # [T, E] bf16
    weight: torch.Tensor,  # [E, W] bf16 or fp32
    bias: torch.Tensor,  # [E] bf16 or fp32
    columns: torch.Tensor,  # [S, R, E] bf16, updated
    rows: torch.Tensor,  # [N, 8] int32
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E], silu applied: a token reads its column and the W - 1 before; before position 0 are zeros."""
    (num_tokens, width), taps = x.shape, weight.shape[1]
    slots, ring_len = columns.shape[:2]
    kinds = (torch.bfloat16, torch.float32)
    device = x.device
    check("conv", "x", x, (num_tokens, width), torch.bfloat16, device, apart=1)
    check("conv", "weight", weight, (width, taps), kinds, device)
    check("conv", "bias", bias, (width,), kinds, device)
    check("conv", "columns", columns, (slots, ring_len, width), torch.bfloat16, device)
    check("conv", "rows", rows, (rows.shape[0], 8), torch.int32, device)
    if ring_len < chunk_len + taps - 1:
        raise ValueError(
            f"conv: a ring of {ring_len} columns cannot hold a chunk of {chunk_len} and {taps - 1} more"
        )
    y = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    num_rows, channels = rows.shape[0], min(CHANNELS, pow2(width))
    lines = cdiv(width, channels)
    sizes = dict(E=width, W=taps, CHUNK=chunk_len, BE=channels, num_warps=4, enable_fp_fusion=False)
    block_of_rows = min(max(pow2(num_rows), 16), 256)
    _conv[(cdiv(num_tokens, TOKENS), lines)](
        x, weight, bias, columns, rows, y, num_rows, num_tokens, ring_len, x.stride(0), **sizes,
        ROWS=block_of_rows, BT=TOKENS, LATE=ring_len >= 2 * chunk_len + taps,
    )  # fmt: skip
    if num_tokens + taps - 1 > ring_len:
        _keep_long[(num_rows, lines)](x, columns, rows, ring_len, x.stride(0), **sizes)
    return y
