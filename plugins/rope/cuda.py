"""Rotary positions, on CUDA, from the builder's table."""

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_rope = Kernel("rope", "_rope")

HEADS = 8  # heads of a program


def rope(
    x: torch.Tensor,  # [T, H, D]
    positions: torch.Tensor,  # [T] int32
    table: torch.Tensor,  # [M, 2, R]
) -> torch.Tensor:  # [T, H, D]
    """See reference.py. Channels of a token at a place that the table has not come out as zeros."""
    check("rope", "x", x, (None, None, None), FLOATS, x.device, apart=2, anywhere=True)
    num_tokens, num_heads, depth = x.shape
    check("rope", "positions", positions, (num_tokens,), (torch.int32, torch.int64), x.device)
    check("rope", "table", table, (None, 2, None), FLOATS, x.device, anywhere=True)
    num_places, _, pairs = table.shape
    if 2 * pairs > depth:
        raise ValueError(f"rope: a table of {pairs} pairs for {depth} channels")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        heads = min(HEADS, pow2(num_heads))
        _rope[num_tokens, cdiv(num_heads, heads)](
            x, positions, table, y, x.stride(0), x.stride(1), num_heads, num_places,
            DEPTH=depth, PAIRS=pairs, HEADS=heads, PAIR_LANES=pow2(pairs),
            REST_LANES=pow2(depth - 2 * pairs), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
