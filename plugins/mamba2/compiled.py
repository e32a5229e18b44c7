"""Mamba2's recurrence, one token after the other, compiled: reference.py's arithmetic in one fixed order.

A prompt, a decode step and the replay of records run the same loop, so its bits cannot depend on how a
sequence is split. An item of work is one head of one row; its state stays in the first-level cache while the
row's tokens pass.
"""

import math

import numpy as np

from hemiola.plugins.cpu.activations import softplus
from hemiola.plugins.cpu.code import Operand, code_of, lines, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.rows import live_tokens, owned, read_row
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    clear,
    copy,
    f32,
    fma,
    from_bits,
    get,
    largest,
    load,
    load_some,
    put,
    settle,
    smallest,
    splat,
    store,
    store_some,
    sums_of,
)
from hemiola.plugins.sizes import ceil_div

WIDE = 4 * LANES  # channels of the state whose inputs are kept in registers together
BLOCK = 16  # tokens of an item of work of _steps


def mamba2(
    x: Operand,  # [T, H, P]
    B: Operand,  # [T, G, D]
    C: Operand,  # [T, G, D]
    dt: Operand,  # [T, H]
    dt_bias: Operand,  # [H]
    A: Operand,  # [H]
    D: Operand,  # [H]
    state: Operand,  # [S, H, P, D]
    x_records: Operand,  # [S, R, H, P]
    B_records: Operand,  # [S, R, G, D]
    dt_records: Operand,  # [S, R, H]
    rows: Operand,  # [N, 8]
    chunk_len: int,
    dt_min: float,
    dt_max: float,
) -> Operand:
    """y[T, H, P], the D * x term included; see reference.py."""
    code, ring_len, (heads, width, depth) = code_of(x), x_records.shape[1], state.shape[1:]
    (num_tokens, *_), num_rows = x.shape, rows.shape[0]
    live = live_tokens(rows, num_tokens, chunk_len, ring_len, state.shape[0])
    x, B, C, dt = lines(x), lines(B), lines(C), lines(dt)
    y, steps = owned(live, *x.shape), code.empty(*dt.shape)
    limits = (dt_min, min(dt_max, float(np.finfo(np.float32).max)))
    raw = (*dt.shape, dt, dt.stride(0), dt_bias, *limits, steps)
    code.call(_steps, ceil_div(num_tokens, BLOCK), numel(dt) * 2.0, *raw, scratch=4 * LANES)
    work = (num_rows, chunk_len, ring_len, heads, width, B.shape[1], depth, rows)
    work += (x, x.stride(0), B, B.stride(0), steps, x_records, B_records, dt_records)
    num_updates = num_tokens + num_rows * (chunk_len // 2)  # about: half a chunk of records
    cost, room = num_updates * (0.06 * heads * width * depth), 4 * (width * depth + LANES * LANES)
    code.call(_scan, num_rows * heads, cost, *work, C, C.stride(0), A, D, state, y, scratch=room)
    code.call(_store, num_rows, (numel(x) + numel(B)) * 0.2, *work)
    return y


@Kernel
def _steps(item, scratch, num_tokens, heads, dt, dt_len, dt_bias, dt_min, dt_max, steps):
    """softplus(dt + dt_bias) within its limits; an item is BLOCK tokens."""
    low, high = splat(from_bits(dt_min)), splat(from_bits(dt_max))
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for i in range(0, heads, LANES):
            raw = load_some(dt, t * dt_len + i, heads - i, scratch)
            value = softplus(add(raw, load_some(dt_bias, i, heads - i, scratch)))
            value = smallest(largest(value, low), high)
            store_some(steps, t * heads + i, heads - i, value, scratch)


@Kernel
def _scan(
    item, scratch, num_rows, chunk_len, ring_len, heads, width, groups, depth, rows, x, x_len, B, B_len,
    dt, x_records, B_records, dt_records, C, C_len, A, D, state, y,
):  # fmt: skip
    """An item is one head of one row. x_len is from token to token of x."""
    row, head, size = read_row(rows, item // heads, chunk_len), item % heads, width * depth
    if row.end == row.committed:
        return
    h, sums = scratch, scratch + 4 * size
    group, committed = head // (heads // groups), row.committed
    if committed == 0:
        clear(h, 0, size)
        copy(h, 0, state, (row.slot * heads + head) * size, size)
    else:
        copy(state, (row.slot * heads + head) * size, h, 0, size)
    for position in range(row.edge, row.end):
        if position < committed:
            at = row.slot * ring_len + position % ring_len
            _advance(
                h, width, depth, get(dt_records, at * heads + head), get(A, head),
                x_records, (at * heads + head) * width, B_records, (at * groups + group) * depth,
            )  # fmt: skip
        else:
            t = row.first + position - committed
            x_t, C_t = t * x_len + head * width, t * C_len + group * depth
            dt_t = get(dt, t * heads + head)
            _advance(h, width, depth, dt_t, get(A, head), x, x_t, B, t * B_len + group * depth)
            _read(h, width, depth, sums, C, C_t, get(D, head), x, x_t, y, (t * heads + head) * width)
        if position + 1 == row.new_edge:
            copy(h, 0, state, (row.slot * heads + head) * size, size)
        if row.snapshot_slot > 0 and position + 1 == row.snapshot_edge:
            copy(h, 0, state, (row.snapshot_slot * heads + head) * size, size)


@helper
def _advance(h, width, depth, dt, A, x, x_at, B, B_at):
    """h = exp(dt A) h + dt x (x) B.

    As h + (exp(dt A) - 1) h: a decay near 1, rounded, would miss by as much at every token.
    """
    change = splat(f32(math.expm1(np.float64(dt) * np.float64(A))))
    for d in range(0, depth // WIDE * WIDE, WIDE):
        B0, B1 = load(B, B_at + d), load(B, B_at + d + 16)
        B2, B3 = load(B, B_at + d + 32), load(B, B_at + d + 48)
        for p in range(width):
            at, update = p * depth + d, splat(dt * get(x, x_at + p))
            store(h, at, fma(update, B0, fma(change, load(h, at), load(h, at))))
            store(h, at + 16, fma(update, B1, fma(change, load(h, at + 16), load(h, at + 16))))
            store(h, at + 32, fma(update, B2, fma(change, load(h, at + 32), load(h, at + 32))))
            store(h, at + 48, fma(update, B3, fma(change, load(h, at + 48), load(h, at + 48))))
    for d in range(depth // WIDE * WIDE, depth, LANES):
        B0 = load(B, B_at + d)
        for p in range(width):
            at, update = p * depth + d, splat(dt * get(x, x_at + p))
            store(h, at, fma(update, B0, fma(change, load(h, at), load(h, at))))


@helper
def _read(h, width, depth, sums, C, C_at, D, x, x_at, y, y_at):
    """y = h.C + D x"""
    dots(h, 0, width, depth, C, C_at, y, y_at, sums)
    for p in range(0, width, LANES):
        store(y, y_at + p, fma(splat(D), load(x, x_at + p), load(y, y_at + p)))


@helper
def dots(weight, weight_at, num_outputs, num_inputs, x, x_at, out, out_at, products):
    """out = weight [outputs, inputs] times x, 16 outputs a round; `products` has room for 256 numbers."""
    wide = num_inputs // WIDE * WIDE
    for j in range(0, num_outputs, LANES):
        for i in range(LANES):
            store(products, i * LANES, splat(f32(0.0)))
        for d in range(0, wide, WIDE):
            at = x_at + d
            x0, x1, x2, x3 = load(x, at), load(x, at + 16), load(x, at + 32), load(x, at + 48)
            for i in range(LANES):
                at = weight_at + (j + i) * num_inputs + d
                sum_ = fma(load(weight, at + 16), x1, fma(load(weight, at), x0, load(products, i * LANES)))
                sum_ = fma(load(weight, at + 48), x3, fma(load(weight, at + 32), x2, sum_))
                store(products, i * LANES, sum_)
            settle()
        for d in range(wide, num_inputs, LANES):
            x0 = load(x, x_at + d)
            for i in range(LANES):
                at = weight_at + (j + i) * num_inputs + d
                store(products, i * LANES, fma(load(weight, at), x0, load(products, i * LANES)))
            settle()
        store(out, out_at + j, sums_of(products, 0))


@Kernel
def _store(
    n, scratch, num_rows, chunk_len, ring_len, heads, width, groups, depth, rows, x, x_len, B, B_len,
    dt, x_records, B_records, dt_records,
):  # fmt: skip
    """The new tokens of row n behind its new edge become records."""
    row = read_row(rows, n, chunk_len)
    for position in range(max(row.committed, row.new_edge), row.end):
        t, at = row.first + position - row.committed, row.slot * ring_len + position % ring_len
        copy(x, t * x_len, x_records, at * heads * width, heads * width)
        copy(B, t * B_len, B_records, at * groups * depth, groups * depth)
        for i in range(heads):
            put(dt_records, at * heads + i, get(dt, t * heads + i))
