"""Mamba2's recurrence, one token after the other, compiled: reference.py's arithmetic in one fixed order.

A prompt, a decode step and the replay of records run the same loop, so its bits cannot depend on how a
sequence is split. An item of work is one head of one row; its state stays in the first-level cache while the
row's tokens pass.
"""

import math

import numpy as np
import torch

from hemiola.plugins.grid import step_work
from hemiola.plugins.jit import Kernel, helper, lines
from hemiola.plugins.simd import (
    LANES,
    copy,
    dots,
    f32,
    fma,
    get,
    get_long,
    load,
    put,
    splat,
    store,
    take,
    unpack,
)

WIDE = 4 * LANES  # channels of the state whose inputs are kept in registers together


def mamba2(
    x: torch.Tensor,  # [T, H, P]
    B: torch.Tensor,  # [T, G, D]
    C: torch.Tensor,  # [T, G, D]
    dt: torch.Tensor,  # [T, H]
    A: torch.Tensor,  # [H]
    D: torch.Tensor,  # [H]
    state: torch.Tensor,  # [S, H, P, D]
    x_records: torch.Tensor,  # [S, R, H, P]
    B_records: torch.Tensor,  # [S, R, G, D]
    dt_records: torch.Tensor,  # [S, R, H]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """y[T, H, P], the D * x term included; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    step = step_work(rows, chunk_len, x_records.shape[1], state.shape[0], x.shape[0])
    y = (torch.empty if step.num_tokens == x.shape[0] else torch.zeros)(x.shape)
    x, B, C, dt = lines(x), lines(B), lines(C), lines(dt)
    new = (x.data_ptr(), x.stride(0), B.data_ptr(), B.stride(0), dt.data_ptr(), dt.stride(0))
    rings = (x_records.data_ptr(), B_records.data_ptr(), dt_records.data_ptr())
    heads, width, depth = state.shape[1:]
    sizes = (step.address, step.num_rows, x_records.shape[1], heads, width, B.shape[1], depth)
    rest = (C.data_ptr(), C.stride(0), A.data_ptr(), D.data_ptr(), state.data_ptr(), y.data_ptr())
    cost = 0.06 * step.num_updates * heads * width * depth
    _scan(step.num_rows * heads, cost, *sizes, *new, *rings, *rest)
    _store(step.num_rows, 0.2 * (x.numel() + B.numel()), *sizes, *new, *rings)
    return y


@Kernel
def _scan(call):
    """An item is one head of one row. x_len is from token to token of x."""
    (
        num_items, rows, num_rows, ring_len, heads, width, groups, depth,
        x, x_len, B, B_len, dt, dt_len, x_records, B_records, dt_records, C, C_len, A, D, state, y,
    ) = unpack(call, 22)  # fmt: skip
    size = width * depth
    h, sums = np.empty(size, np.float32), np.empty(LANES * LANES, np.float32)
    while True:
        item = take(call)
        if item >= num_items:
            break
        row, head = item // heads, item % heads
        group = head // (heads // groups)
        slot, start = get_long(rows, row), get_long(rows, num_rows + row)
        committed, end = get_long(rows, 2 * num_rows + row), get_long(rows, 3 * num_rows + row)
        edge, new_edge = get_long(rows, 4 * num_rows + row), get_long(rows, 5 * num_rows + row)
        snapshot, snapshot_edge = get_long(rows, 6 * num_rows + row), get_long(rows, 7 * num_rows + row)
        if committed == 0:
            h[:] = f32(0.0)
            copy(h, 0, state, (slot * heads + head) * size, size)
        else:
            copy(state, (slot * heads + head) * size, h, 0, size)
        for position in range(edge, end):
            if position < committed:
                at = slot * ring_len + position % ring_len
                _advance(
                    h, width, depth, get(dt_records, at * heads + head), get(A, head),
                    x_records, (at * heads + head) * width, B_records, (at * groups + group) * depth,
                )  # fmt: skip
            else:
                t = start + position - committed
                x_t, C_t = t * x_len + head * width, t * C_len + group * depth
                dt_t = get(dt, t * dt_len + head)
                _advance(h, width, depth, dt_t, get(A, head), x, x_t, B, t * B_len + group * depth)
                _read(h, width, depth, sums, C, C_t, get(D, head), x, x_t, y, (t * heads + head) * width)
            if position + 1 == new_edge:
                copy(h, 0, state, (slot * heads + head) * size, size)
            if snapshot > 0 and position + 1 == snapshot_edge:
                copy(h, 0, state, (snapshot * heads + head) * size, size)


@helper
def _advance(h, width, depth, dt, A, x, x_at, B, B_at):
    """h = exp(dt A) h + dt x (x) B.

    As h + (exp(dt A) - 1) h: a decay near 1, rounded, would miss by as much at every token.
    """
    change = splat(f32(math.expm1(np.float64(dt) * np.float64(A))))
    for d in range(0, depth // WIDE * WIDE, WIDE):
        B0, B1, B2, B3 = (
            load(B, B_at + d),
            load(B, B_at + d + 16),
            load(B, B_at + d + 32),
            load(B, B_at + d + 48),
        )
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


@Kernel
def _store(call):
    """The new tokens of a row behind its new edge become records."""
    (
        num_items, rows, num_rows, ring_len, heads, width, groups, depth,
        x, x_len, B, B_len, dt, dt_len, x_records, B_records, dt_records,
    ) = unpack(call, 16)  # fmt: skip
    while True:
        row = take(call)
        if row >= num_items:
            break
        slot, start = get_long(rows, row), get_long(rows, num_rows + row)
        committed, end = get_long(rows, 2 * num_rows + row), get_long(rows, 3 * num_rows + row)
        for position in range(max(committed, get_long(rows, 5 * num_rows + row)), end):
            t, at = start + position - committed, slot * ring_len + position % ring_len
            copy(x, t * x_len, x_records, at * heads * width, heads * width)
            copy(B, t * B_len, B_records, at * groups * depth, groups * depth)
            for i in range(heads):
                put(dt_records, at * heads + i, get(dt, t * dt_len + i))
