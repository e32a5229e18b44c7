"""Rotary positions, on CUDA, from the builder's table."""

import triton
import triton.language as tl


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
