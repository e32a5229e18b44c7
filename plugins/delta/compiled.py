"""The gated delta rule, one token after the other, compiled: reference.py's arithmetic in one fixed order.

A prompt, a decode step and the replay of records run the same loop, so its bits cannot depend on how a
sequence is split. Columns of a state do not meet: an item of work is a block of columns of one head of one
row, and stays in the first-level cache while the row's tokens pass.
"""

from hemiola.plugins.cpu.activations import exp, sigmoid, softplus
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
    get,
    load,
    load_some,
    mul,
    put,
    splat,
    store,
    store_some,
    sub,
)
from hemiola.plugins.sizes import ceil_div

WIDE = 4 * LANES  # columns whose sums are kept in registers together
BLOCK = 16  # tokens of an item of work of _gates


def delta(
    q: Operand,  # [T, G, K]
    k: Operand,  # [T, G, K]
    v: Operand,  # [T, H, V]
    a: Operand,  # [T, H, J]
    b: Operand,  # [T, H]
    dt_bias: Operand,  # [H, J]
    A: Operand,  # [H]
    state: Operand,  # [S, H, K, V]
    k_records: Operand,  # [S, R, G, K]
    v_records: Operand,  # [S, R, H, V]
    g_records: Operand,  # [S, R, H, J]
    beta_records: Operand,  # [S, R, H]
    rows: Operand,  # [N, 8]
    chunk_len: int,
) -> Operand:
    """o[T, H, V]; see reference.py."""
    code, ring_len, (heads, k_dim, v_dim) = code_of(v), k_records.shape[1], state.shape[1:]
    decays = a.shape[2]
    (num_tokens, *_), num_rows = v.shape, rows.shape[0]
    live = live_tokens(rows, num_tokens, chunk_len, ring_len, state.shape[0])
    q, k, v, a, b = lines(q), lines(k), lines(v), lines(a), lines(b)
    o, g, beta = owned(live, *v.shape), code.empty(*a.shape), code.empty(*b.shape)
    raw = (*a.shape, a, a.stride(0), b, b.stride(0), dt_bias, A, g, beta)
    code.call(_gates, ceil_div(num_tokens, BLOCK), numel(a) * 2.0, *raw, scratch=4 * LANES)
    work = (num_rows, chunk_len, ring_len, k.shape[1], k_dim, heads, v_dim, decays, rows)
    work += (k, k.stride(0), v, v.stride(0), g, beta, k_records, v_records, g_records, beta_records)
    width = WIDE if v_dim % WIDE == 0 else LANES
    num_updates = num_tokens + num_rows * (chunk_len // 2)  # about: half a chunk of records
    cost, room = num_updates * (0.08 * heads * k_dim * v_dim), 4 * k_dim * (width + 2)
    scan = (*work, q, q.stride(0), state, o, width)
    code.call(_scan, num_rows * (heads * (v_dim // width)), cost, *scan, scratch=room)
    code.call(_store, num_rows, (numel(k) + numel(v)) * 0.2, *work)
    return o


@Kernel
def _gates(item, scratch, num_tokens, heads, decays, a, a_len, b, b_len, dt_bias, A, g, beta):
    """g = A softplus(a + dt_bias) and beta = sigmoid(b); an item is BLOCK tokens."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for i in range(0, heads, LANES):
            opening = sigmoid(load_some(b, t * b_len + i, heads - i, scratch))
            store_some(beta, t * heads + i, heads - i, opening, scratch)
        size = heads * decays
        for i in range(0, size, LANES):
            raw = load_some(a, t * a_len + i, size - i, scratch)
            raw = add(raw, load_some(dt_bias, i, size - i, scratch))
            factor = load_some(A, i, size - i, scratch) if decays == 1 else splat(get(A, i // decays))
            store_some(g, t * size + i, size - i, mul(factor, softplus(raw)), scratch)


@Kernel
def _scan(
    item, scratch, num_rows, chunk_len, ring_len, groups, k_dim, heads, v_dim, decays, rows,
    k, k_len, v, v_len, g, beta, k_records, v_records, g_records, beta_records, q, q_len, state, o, width,
):  # fmt: skip
    """An item is `width` columns of one head of one row. x_len is from token to token of x."""
    blocks = v_dim // width
    column, head = item % blocks * width, item // blocks % heads
    row = read_row(rows, item // blocks // heads, chunk_len)
    if row.end == row.committed:
        return
    h = scratch
    keep = scratch + 4 * k_dim * width
    weight = keep + 4 * k_dim
    group, committed = head // (heads // groups), row.committed
    place = (row.slot * heads + head) * k_dim * v_dim + column
    if committed == 0:
        clear(h, 0, k_dim * width)
        _save(h, k_dim, state, place, v_dim, width)
    else:
        _fetch(h, k_dim, state, place, v_dim, width)
    for position in range(row.edge, row.end):
        if position < committed:
            at = row.slot * ring_len + position % ring_len
            _advance(
                h, keep, weight, k_dim, width, decays,
                k_records, (at * groups + group) * k_dim, v_records, (at * heads + head) * v_dim + column,
                g_records, (at * heads + head) * decays, get(beta_records, at * heads + head),
            )  # fmt: skip
        else:
            t = row.first + position - committed
            _advance(
                h, keep, weight, k_dim, width, decays,
                k, t * k_len + group * k_dim, v, t * v_len + head * v_dim + column,
                g, (t * heads + head) * decays, get(beta, t * heads + head),
            )  # fmt: skip
            _read(h, width, q, t * q_len + group * k_dim, k_dim, o, (t * heads + head) * v_dim + column)
        if position + 1 == row.new_edge:
            _save(h, k_dim, state, place, v_dim, width)
        if row.snapshot_slot > 0 and position + 1 == row.snapshot_edge:
            target = (row.snapshot_slot * heads + head) * k_dim * v_dim + column
            _save(h, k_dim, state, target, v_dim, width)


@helper
def _fetch(h, k_dim, state, at, stride, width):
    for i in range(k_dim):
        copy(state, at + i * stride, h, i * width, width)


@helper
def _save(h, k_dim, state, at, stride, width):
    for i in range(k_dim):
        copy(h, i * width, state, at + i * stride, width)


@helper
def _advance(h, keep, weight, k_dim, width, decays, k, k_at, v, v_at, g, g_at, beta):
    """h = d h + k (x) u with u = beta (v - (d k).h) and d = exp(g)"""
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
def _store(
    n, scratch, num_rows, chunk_len, ring_len, groups, k_dim, heads, v_dim, decays, rows,
    k, k_len, v, v_len, g, beta, k_records, v_records, g_records, beta_records,
):  # fmt: skip
    """The new tokens of row n behind its new edge become records."""
    row = read_row(rows, n, chunk_len)
    for position in range(max(row.committed, row.new_edge), row.end):
        t, at = row.first + position - row.committed, row.slot * ring_len + position % ring_len
        copy(k, t * k_len, k_records, at * groups * k_dim, groups * k_dim)
        copy(v, t * v_len, v_records, at * heads * v_dim, heads * v_dim)
        for i in range(heads * decays):
            put(g_records, at * heads * decays + i, get(g, t * heads * decays + i))
        for i in range(heads):
            put(beta_records, at * heads + i, get(beta, t * heads + i))
