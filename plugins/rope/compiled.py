"""Rotary positions, compiled: each product is rounded, then their sum, in vectors and single lanes alike."""

import torch

from hemiola.plugins.cpu.jit import Kernel, lines
from hemiola.plugins.cpu.simd import LANES, add, get, get_int, load, mul, put, store, sub

BLOCK = 16  # tokens of an item of work


def rope(
    x: torch.Tensor,  # [T, H, D]
    positions: torch.Tensor,  # [T] int32
    table: torch.Tensor,  # [M, 2, R]
) -> torch.Tensor:  # [T, H, D]
    """See reference.py. Raises IndexError where a position is not in the table."""
    y = torch.empty(*x.shape)
    if not x.numel():
        return y
    low, high = positions.aminmax()
    if low < 0 or high >= len(table):
        raise IndexError(f"rope: positions {int(low)} to {int(high)}, but the table ends before {len(table)}")
    x, positions = lines(x), positions.contiguous()
    sizes = (*x.shape, table.shape[2], x, x.stride(0))
    _rope(-(-x.shape[0] // BLOCK), 0.2 * x.numel(), *sizes, positions, table, y)
    return y


@Kernel
def _rope(item, scratch, num_tokens, heads, depth, pairs, x, x_len, positions, table, y):
    """An item is BLOCK tokens. x_len is from token to token of x."""
    whole = pairs // LANES * LANES
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        cos = get_int(positions, t) * 2 * pairs
        sin = cos + pairs
        for head in range(heads):
            source, target = t * x_len + head * depth, (t * heads + head) * depth
            for i in range(0, whole, LANES):
                a, b = load(x, source + i), load(x, source + pairs + i)
                c, s = load(table, cos + i), load(table, sin + i)
                store(y, target + i, sub(mul(a, c), mul(b, s)))
                store(y, target + pairs + i, add(mul(b, c), mul(a, s)))
            for i in range(whole, pairs):
                a, b = get(x, source + i), get(x, source + pairs + i)
                c, s = get(table, cos + i), get(table, sin + i)
                put(y, target + i, a * c - b * s)
                put(y, target + pairs + i, b * c + a * s)
            for i in range(2 * pairs, depth):
                put(y, target + i, get(x, source + i))
