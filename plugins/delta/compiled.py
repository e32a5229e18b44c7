"""The gated delta rule, one token after the other, compiled: reference.py's arithmetic in one fixed order.

A prompt, a decode step and the replay of records run the same loop, so its bits cannot depend on how a
sequence is split. Columns of a state do not meet: an item of work is a block of columns of one head of one
row, and stays in the first-level cache while the row's tokens pass.
"""

import numpy as np
import torch

from hemiola.plugins.grid import step_work
from hemiola.plugins.jit import Kernel, helper, lines
from hemiola.plugins.simd import (
    LANES,
    copy,
    exp,
    f32,
    fma,
    get,
    get_long,
    load,
    mul,
    put,
    splat,
    store,
    sub,
    take,
    unpack,
)

WIDE = 4 * LANES  # columns whose sums are kept in registers together


def delta(
    q: torch.Tensor,  # [T, G, K]
    k: torch.Tensor,  # [T, G, K]
    v: torch.Tensor,  # [T, H, V]
    g: torch.Tensor,  # [T, H, J]
    beta: torch.Tensor,  # [T, H]
    state: torch.Tensor,  # [S, H, K, V]
    k_records: torch.Tensor,  # [S, R, G, K]
    v_records: torch.Tensor,  # [S, R, H, V]
    g_records: torch.Tensor,  # [S, R, H, J]
    beta_records: torch.Tensor,  # [S, R, H]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """o[T, H, V]; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    step = step_work(rows, chunk_len, k_records.shape[1], state.shape[0], v.shape[0])
    o = (torch.empty if step.num_tokens == v.shape[0] else torch.zeros)(v.shape)
    q, k, v, g, beta = lines(q), lines(k), lines(v), lines(g), lines(beta)
    new = (k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
    new += (g.data_ptr(), g.stride(0), beta.data_ptr(), beta.stride(0))
    rings = (k_records.data_ptr(), v_records.data_ptr(), g_records.data_ptr(), beta_records.data_ptr())
    heads, k_dim, v_dim = state.shape[1:]
    sizes = (step.address, step.num_rows, k_records.shape[1], k.shape[1], k_dim, heads, v_dim, g.shape[2])
    width = WIDE if v_dim % WIDE == 0 else LANES
    work, rest = (*sizes, *new, *rings), (q.data_ptr(), q.stride(0), state.data_ptr(), o.data_ptr(), width)
    cost = 0.08 * step.num_updates * heads * k_dim * v_dim
    _scan(step.num_rows * heads * (v_dim // width), cost, *work, *rest)
    _store(step.num_rows, 0.2 * (k.numel() + v.numel()), *work)
    return o


@Kernel
def _scan(call):
    """An item is `width` columns of one head of one row. x_len is from token to token of x."""
    (
        num_items, rows, num_rows, ring_len, groups, k_dim, heads, v_dim, decays,
        k, k_len, v, v_len, g, g_len, beta, beta_len, k_records, v_records, g_records, beta_records,
        q, q_len, state, o, width,
    ) = unpack(call, 25)  # fmt: skip
    h = np.empty(k_dim * width, np.float32)
    keep, weight = np.empty(k_dim, np.float32), np.empty(k_dim, np.float32)
    blocks = v_dim // width
    while True:
        item = take(call)
        if item >= num_items:
            break
        column = item % blocks * width
        head = item // blocks % heads
        row = item // blocks // heads
        group = head // (heads // groups)
        slot, first = get_long(rows, row), get_long(rows, num_rows + row)
        committed, end = get_long(rows, 2 * num_rows + row), get_long(rows, 3 * num_rows + row)
        edge, new_edge = get_long(rows, 4 * num_rows + row), get_long(rows, 5 * num_rows + row)
        snapshot, snapshot_edge = get_long(rows, 6 * num_rows + row), get_long(rows, 7 * num_rows + row)
        if committed == 0:
            h[:] = f32(0.0)
            _save(h, state, (slot * heads + head) * k_dim * v_dim + column, v_dim, width)
        else:
            _fetch(h, state, (slot * heads + head) * k_dim * v_dim + column, v_dim, width)
        for position in range(edge, end):
            if position < committed:
                at = slot * ring_len + position % ring_len
                _advance(
                    h, keep, weight, width, decays,
                    k_records, (at * groups + group) * k_dim, v_records, (at * heads + head) * v_dim + column,
                    g_records, (at * heads + head) * decays, get(beta_records, at * heads + head),
                )  # fmt: skip
            else:
                t = first + position - committed
                _advance(
                    h, keep, weight, width, decays,
                    k, t * k_len + group * k_dim, v, t * v_len + head * v_dim + column,
                    g, t * g_len + head * decays, get(beta, t * beta_len + head),
                )  # fmt: skip
                _read(h, width, q, t * q_len + group * k_dim, k_dim, o, (t * heads + head) * v_dim + column)
            if position + 1 == new_edge:
                _save(h, state, (slot * heads + head) * k_dim * v_dim + column, v_dim, width)
            if snapshot > 0 and position + 1 == snapshot_edge:
                _save(h, state, (snapshot * heads + head) * k_dim * v_dim + column, v_dim, width)


@helper
def _fetch(h, state, at, stride, width):
    for i in range(h.size // width):
        for j in range(0, width, LANES):
            store(h, i * width + j, load(state, at + i * stride + j))


@helper
def _save(h, state, at, stride, width):
    for i in range(h.size // width):
        for j in range(0, width, LANES):
            store(state, at + i * stride + j, load(h, i * width + j))


@helper
def _advance(h, keep, weight, width, decays, k, k_at, v, v_at, g, g_at, beta):
    """h = d h + k (x) u with u = beta (v - (d k).h) and d = exp(g)"""
    k_dim = keep.size
    for i in range(0, k_dim, LANES):
        d = exp(splat(get(g, g_at))) if decays == 1 else exp(load(g, g_at + i))
        store(keep, i, d)
        store(weight, i, mul(d, load(k, k_at + i)))
    b = splat(beta)
    if width == LANES:
        u = splat(f32(0.0))
        for i in range(k_dim):
            u = fma(load(h, i * LANES), splat(get(weight, i)), u)
        u = mul(b, sub(load(v, v_at), u))
        for i in range(k_dim):
            at = i * LANES
            store(h, at, fma(splat(get(k, k_at + i)), u, mul(splat(get(keep, i)), load(h, at))))
        return
    u0 = u1 = u2 = u3 = splat(f32(0.0))
    for i in range(k_dim):
        at, w = i * WIDE, splat(get(weight, i))
        u0, u1 = fma(load(h, at), w, u0), fma(load(h, at + 16), w, u1)
        u2, u3 = fma(load(h, at + 32), w, u2), fma(load(h, at + 48), w, u3)
    u0, u1 = mul(b, sub(load(v, v_at), u0)), mul(b, sub(load(v, v_at + 16), u1))
    u2, u3 = mul(b, sub(load(v, v_at + 32), u2)), mul(b, sub(load(v, v_at + 48), u3))
    for i in range(k_dim):
        at, k_i, d = i * WIDE, splat(get(k, k_at + i)), splat(get(keep, i))
        store(h, at, fma(k_i, u0, mul(d, load(h, at))))
        store(h, at + 16, fma(k_i, u1, mul(d, load(h, at + 16))))
        store(h, at + 32, fma(k_i, u2, mul(d, load(h, at + 32))))
        store(h, at + 48, fma(k_i, u3, mul(d, load(h, at + 48))))


@helper
def _read(h, width, q, q_at, k_dim, o, o_at):
    """o = q.h"""
    if width == LANES:
        total = splat(f32(0.0))
        for i in range(k_dim):
            total = fma(load(h, i * LANES), splat(get(q, q_at + i)), total)
        store(o, o_at, total)
        return
    o0 = o1 = o2 = o3 = splat(f32(0.0))
    for i in range(k_dim):
        at, q_i = i * WIDE, splat(get(q, q_at + i))
        o0, o1 = fma(load(h, at), q_i, o0), fma(load(h, at + 16), q_i, o1)
        o2, o3 = fma(load(h, at + 32), q_i, o2), fma(load(h, at + 48), q_i, o3)
    store(o, o_at, o0)
    store(o, o_at + 16, o1)
    store(o, o_at + 32, o2)
    store(o, o_at + 48, o3)


@Kernel
def _store(call):
    """The new tokens of a row behind its new edge become records."""
    (
        num_items, rows, num_rows, ring_len, groups, k_dim, heads, v_dim, decays,
        k, k_len, v, v_len, g, g_len, beta, beta_len, k_records, v_records, g_records, beta_records,
    ) = unpack(call, 20)  # fmt: skip
    while True:
        row = take(call)
        if row >= num_items:
            break
        slot, first, committed = (
            get_long(rows, row),
            get_long(rows, num_rows + row),
            get_long(rows, 2 * num_rows + row),
        )
        end, new_edge = get_long(rows, 3 * num_rows + row), get_long(rows, 5 * num_rows + row)
        for position in range(max(committed, new_edge), end):
            t, at = first + position - committed, slot * ring_len + position % ring_len
            copy(k, t * k_len, k_records, at * groups * k_dim, groups * k_dim)
            copy(v, t * v_len, v_records, at * heads * v_dim, heads * v_dim)
            for i in range(heads * decays):
                put(g_records, at * heads * decays + i, get(g, t * g_len + i))
            for i in range(heads):
                put(beta_records, at * heads + i, get(beta, t * beta_len + i))
