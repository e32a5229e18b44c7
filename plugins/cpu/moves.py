"""What torch computes between our ops, as kernels: it moves numbers, or rounds each once."""

from hemiola.plugins.cpu.code import Case, Operand, code_of, complain, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    f32,
    get,
    get_int,
    largest,
    load,
    load_some,
    mul,
    put,
    splat,
    store,
    store_some,
)
from hemiola.plugins.sizes import ceil_div

BLOCK = 16  # tokens of an item of work
SUM, PRODUCT, RELU, SQUARED_RELU = range(4)


def concatenate(parts: list[Operand]) -> Operand:
    """Lines [T, A] beside lines [T, B]."""
    code, num_tokens, at = code_of(parts[0]), parts[0].shape[0], 0
    whole = code.empty(num_tokens, sum(part.shape[1] for part in parts))
    for part in parts:
        width = part.shape[1]
        where = (num_tokens, width, part, part.stride(0), whole, at, whole.stride(0))
        code.call(_place, ceil_div(num_tokens, BLOCK), numel(part) * 0.1, *where)
        at += width
    return whole


def gather(x: Operand, ids: Operand) -> Operand:
    """Lines `ids` [L] of x [T, W]."""
    code, (num_lines, width) = code_of(x), x.shape
    y = code.empty(ids.shape[0], width)
    fault = code.fault(Case(IndexError, "line {0} is wanted of {1} tokens"))
    sizes = (ids.shape[0], num_lines, width, ids, x, x.stride(0), y, fault)
    code.call(_gather, ceil_div(ids.shape[0], BLOCK), numel(y) * 0.1, *sizes)
    return y


def combine(kind: int, a: Operand, b: Operand) -> Operand:
    """Number by number, for [T, W] each; RELU and SQUARED_RELU look at the first alone."""
    code, y = code_of(a), code_of(a).empty(*a.shape)
    where = (*a.shape, kind, a, a.stride(0), b, b.stride(0), y)
    code.call(_combine, ceil_div(a.shape[0], BLOCK), numel(a) * 0.15, *where, scratch=4 * LANES)
    return y


@helper
def move(source, source_at, target, target_at, size):
    """`size` numbers."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(target, target_at + i, load(source, source_at + i))
    for i in range(whole, size):
        put(target, target_at + i, get(source, source_at + i))


@Kernel
def _place(item, scratch, num_tokens, width, x, x_len, y, at, y_len):
    """y[:, at : at + width] = x; an item is BLOCK tokens."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        move(x, t * x_len, y, t * y_len + at, width)


@Kernel
def _gather(item, scratch, num_ids, num_lines, width, ids, x, x_len, y, fault):
    """y = x[ids]; an item is BLOCK ids."""
    for n in range(item * BLOCK, min(num_ids, (item + 1) * BLOCK)):
        line = get_int(ids, n)
        if line < 0 or line >= num_lines:
            complain(fault, 1, line, num_lines)
            return
        move(x, line * x_len, y, n * width, width)


@Kernel
def _combine(item, scratch, num_tokens, width, kind, a, a_len, b, b_len, y):
    """An item is BLOCK tokens."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for i in range(0, width, LANES):
            count = width - i
            value = load_some(a, t * a_len + i, count, scratch)
            if kind == SUM:
                value = add(value, load_some(b, t * b_len + i, count, scratch))
            elif kind == PRODUCT:
                value = mul(value, load_some(b, t * b_len + i, count, scratch))
            else:
                value = largest(value, splat(f32(0.0)))
                if kind == SQUARED_RELU:
                    value = mul(value, value)
            store_some(y, t * width + i, count, value, scratch)


@Kernel
def poison(item, scratch, lines, line_bytes, memory):
    """NaN in every number of memory that is about to be used: one item, for tests."""
    for i in range(lines * line_bytes // 4):
        put(memory, i, f32(float("nan")))
