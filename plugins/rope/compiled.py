"""Rotary positions, compiled: each product is rounded, then their sum, in vectors and single lanes alike."""

from hemiola.plugins.cpu.code import Case, Operand, code_of, complain, lines, numbers, numel
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import LANES, add, get, get_int, load, mul, put, store, sub
from hemiola.plugins.sizes import ceil_div

BLOCK = 16  # tokens of an item of work


def rope(
    x: Operand,  # [T, H, D]
    positions: Operand,  # [T] int32
    table: Operand,  # [M, 2, R]
) -> Operand:  # [T, H, D]
    """See reference.py. Raises IndexError where a position is not in the table."""
    code, x = code_of(x), lines(x)
    y = code.empty(*x.shape)
    fault = code.fault(Case(IndexError, "rope: position {0}, but the table ends before {1}"))
    sizes = (*x.shape, table.shape[2], table.shape[0], x, x.stride(0))
    where = (numbers(positions), table, y, fault)
    code.call(_rope, ceil_div(x.shape[0], BLOCK), numel(x) * 0.2, *sizes, *where)
    return y


@Kernel
def _rope(item, scratch, num_tokens, heads, depth, pairs, end, x, x_len, positions, table, y, fault):
    """An item is BLOCK tokens. x_len is from token to token of x."""
    whole = pairs // LANES * LANES
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        position = get_int(positions, t)
        if position < 0 or position >= end:
            complain(fault, 1, position, end)
            return
        cos = position * 2 * pairs
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
