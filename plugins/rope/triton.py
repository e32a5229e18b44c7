"""Rotary positions, on CUDA, from the builder's table."""

import torch
import triton
import triton.language as tl

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS

HEADS = 8  # heads of a program


def rope(
    x: torch.Tensor,  # [T, H, D]
    positions: torch.Tensor,  # [T] int32
    table: torch.Tensor,  # [M, 2, R]
) -> torch.Tensor:  # [T, H, D]
    """See reference.py. Channels of a token at a place that the table has not come out as zeros."""
    check("rope", "x", x, (None, None, None), FLOATS, x.device)
    num_tokens, num_heads, depth = x.shape
    check("rope", "positions", positions, (num_tokens,), (torch.int32, torch.int64), x.device)
    check("rope", "table", table, (None, 2, None), FLOATS, x.device)
    num_places, _, pairs = table.shape
    if 2 * pairs > depth or not table.is_contiguous():
        raise ValueError(f"rope: a table of {pairs} pairs, whole lines, for {depth} channels")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        heads = min(HEADS, triton.next_power_of_2(num_heads))
        _rope[num_tokens, triton.cdiv(num_heads, heads)](
            x, positions, table, y, x.stride(0), x.stride(1), num_heads, num_places,
            DEPTH=depth, PAIRS=pairs, HEADS=heads, PAIR_LANES=triton.next_power_of_2(pairs),
            REST_LANES=triton.next_power_of_2(depth - 2 * pairs), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit
def _rope(x, positions, table, y, x_len, head_len, num_heads, num_places, DEPTH: tl.constexpr,
          PAIRS: tl.constexpr, HEADS: tl.constexpr, PAIR_LANES: tl.constexpr,
          REST_LANES: tl.constexpr):  # fmt: skip
    # Grid: tokens x blocks of HEADS heads.
    # Tile: [HEADS, PAIRS] twice, then the channels that are kept.
    # Traffic: x and y once, a line of the table per program.
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(positions + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIR_LANES)[None, :]
    known = (place >= 0) & (place < num_places)
    line = table + place * (2 * PAIRS) + pair
    cos = tl.load(line, mask=(pair < PAIRS) & known, other=0.0).to(tl.float32)
    sin = tl.load(line + PAIRS, mask=(pair < PAIRS) & known, other=0.0).to(tl.float32)
    source = x + token * x_len + head * head_len
    target = y + (token * num_heads + head) * DEPTH
    inside = (head < num_heads) & (pair < PAIRS)
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS + pair, mask=inside, other=0.0).to(tl.float32)
    turned_first = tl.fma(-second, sin, first * cos)
    turned_second = tl.fma(first, sin, second * cos)
    tl.store(target + pair, turned_first.to(y.dtype.element_ty), mask=inside)
    tl.store(target + PAIRS + pair, turned_second.to(y.dtype.element_ty), mask=inside)
    if DEPTH > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, REST_LANES)[None, :]
        inside = (head < num_heads) & (rest < DEPTH)
        kept = tl.load(source + rest, mask=inside & known, other=0.0)
        tl.store(target + rest, kept, mask=inside)
