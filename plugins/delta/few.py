"""Few rows in one launch: what needs no state is computed beside each tile of it, and stays in registers.

Programs of a row share its records, and write new ones beside those that others may still read. A row that
stays in its chunk ends no more than a chunk behind its edge, and a ring is no shorter: places of new tokens
are nobody's. Behind an edge new tokens may come round to the first records (plugins/gpu/recurrences.py,
`whose`): k of a group and gates of a head are then stored by the group's last program. v is read by tiles,
and a tile, like its state, is one program's.
"""

import triton
import triton.language as tl

from hemiola.plugins.delta.tiles import ask, fold, keep_head, keep_values
from hemiola.plugins.delta.weights import asking, erasing, gates, keep_gates, solved
from hemiola.plugins.gpu.early import INTERPRETED
from hemiola.plugins.gpu.precise import dot_wide_left
from hemiola.plugins.gpu.recurrences import ages, places, take, whose


@triton.jit
def stay(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, o,
    h, first_channel, first, slot, committed, edge, end, ring_len, q_len, k_len, v_len, a_len, b_len,
    state_again,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of a head of a row whose edge stays."""
    base, token = slot.to(tl.int64) * ring_len, (first + edge - committed).to(tl.int64)
    n, p, c = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, CHUNK)
    old, new = ages(edge + c, committed, end)
    place = places(edge, ring_len, CHUNK)
    own, inner = slot.to(tl.int64) * (H * K * V) + h * (K * V), p[:, None] + n[None, :] * V
    held, p0 = (edge > 0) & (committed > 0), first_channel
    v_at, kept_v = v + token * v_len + h * V, v_records + (base * H + h) * V
    ahead = tl.load(state + own + p0 + inner, mask=(p < V - p0)[:, None] & held, other=0.0)
    v_ahead = take(kept_v + p0, v_at + p0, place, p, old, new, p < V - p0, H * V, v_len)
    g_c, beta_c, k_c, q_c = _taken(
        q, k, a, b, dt_bias, A, k_records, g_records, beta_records, h, base, token, place, old, new,
        q_len, k_len, a_len, b_len, H, G, K, J,
    )  # fmt: skip
    total, _, mix = solved(q_c, k_c, g_c, beta_c, J)
    high, low = asking(q_c, k_c, total, mix, J)
    high, low = tl.trans(high), tl.trans(low)
    for i in tl.static_range(TILES):
        s, v_c, p0 = _late(ahead), _late(v_ahead), first_channel + i * BV
        stored = p < V - p0
        if i + 1 < TILES:
            p1 = p0 + BV
            ahead = tl.load(state + own + p1 + inner, mask=(p < V - p1)[:, None] & held, other=0.0)
            v_ahead = take(kept_v + p1, v_at + p1, place, p, old, new, p < V - p1, H * V, v_len)
        out, real = tl.trans(ask(s, high, low)) + dot_wide_left(mix, v_c), new[:, None] & stored[None, :]
        to = (token * H + h) * V + p0 + (c[:, None] * (H * V) + p[None, :])
        tl.store(o + to, out.to(o.dtype.element_ty), mask=real)
        tl.store(kept_v + p0 + (place[:, None] * (H * V) + p[None, :]), v_c, mask=real)
        if committed == 0:
            tl.store(state_again + own + p0 + inner, tl.zeros((BV, K), tl.float32), mask=stored[:, None])
    if first_channel == 0:
        keep_gates(g_records + (base * H + h) * J, beta_records + base * H + h, g_c, beta_c, place, new,
                   H, K, J)  # fmt: skip
        if h % (H // G) == 0:
            of_keys = k_records + (base * G + h // (H // G)) * K + (place[:, None] * (G * K) + n[None, :])
            tl.store(of_keys, k_c, mask=new[:, None])


@triton.jit
def _taken(
    q, k, a, b, dt_bias, A, k_records, g_records, beta_records, h, base, token, place, old, new,
    q_len, k_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """A chunk's log decays, beta, keys and queries, all on their way at once."""
    g, n, c = h // (H // G), tl.arange(0, K), tl.arange(0, place.shape[0])
    k_c = take(k_records + base * (G * K) + g * K, k + g * K + token * k_len, place, n, old, new, n < K,
               G * K, k_len)  # fmt: skip
    q_c = tl.load(q + g * K + token * q_len + c[:, None] * q_len + n[None, :], mask=new[:, None], other=0.0)
    g_c, beta_c = gates(a + token * a_len + h * J, b + token * b_len + h, dt_bias + h * J, tl.load(A + h),
                        g_records + (base * H + h) * J, beta_records + base * H + h, place, old, new,
                        a_len, b_len, H, K, J)  # fmt: skip
    return g_c, beta_c, _late(k_c), _late(q_c)


@triton.jit
def _late(a):
    """`a`, for which nobody waits before this: else Triton moves what it loads into another layout where it
    is loaded, and what is loaded behind that is not yet on its way."""
    if INTERPRETED:
        return a
    elif a.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], dtype=a.dtype, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], dtype=a.dtype, is_pure=False, pack=2)


@triton.jit
def walk(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, o,
    h, p0, first, drafts, slot, committed, edge, snapshot, snapshot_edge, end,
    ring_len, q_len, k_len, v_len, a_len, b_len, state_again,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One tile of any other row from its edge to its last token, chunk after chunk."""
    base, at, new_edge = slot.to(tl.int64) * ring_len, h * V + p0, (end - drafts) // CHUNK * CHUNK
    n, p, c = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, CHUNK)
    stored, inner = p < V - p0, p[:, None] + n[None, :] * V
    own = slot.to(tl.int64) * (H * K * V) + h * (K * V) + p0
    other = snapshot.to(tl.int64) * (H * K * V) + h * (K * V) + p0
    s = tl.load(state + own + inner, mask=stored[:, None] & (edge > 0) & (committed > 0), other=0.0)
    if (new_edge == 0) & (committed == 0):
        tl.store(state_again + own + inner, s, mask=stored[:, None])
    for start in range(edge, end, CHUNK):
        token = (first + start - committed).to(tl.int64)
        old, new = ages(start + c, committed, end)
        place = places(start, ring_len, CHUNK)
        v_c = take(v_records + base * (H * V) + at, v + token * v_len + at, place, p, old, new, stored,
                   H * V, v_len)  # fmt: skip
        g_c, beta_c, k_c, q_c = _taken(
            q, k, a, b, dt_bias, A, k_records, g_records, beta_records, h, base, token, place, old, new,
            q_len, k_len, a_len, b_len, H, G, K, J,
        )  # fmt: skip
        v_c = _late(v_c)
        total, inverse, mix = solved(q_c, k_c, g_c, beta_c, J)
        high, low = asking(q_c, k_c, total, mix, J)
        out = tl.trans(ask(s, tl.trans(high), tl.trans(low))) + dot_wide_left(mix, v_c)
        to = token * (H * V) + at + (c[:, None] * (H * V) + p[None, :])
        tl.store(o + to, out.to(o.dtype.element_ty), mask=new[:, None] & stored[None, :])
        if (start + CHUNK <= new_edge) | (start + CHUNK < end):
            s = _folded(s, k_c, v_c, total, inverse, J)
            if start + CHUNK == new_edge:
                tl.store(state_again + own + inner, s, mask=stored[:, None])
            if (snapshot != 0) & (start + CHUNK == snapshot_edge) & (snapshot_edge <= new_edge):
                tl.store(state_again + other + inner, s, mask=stored[:, None])


@triton.jit
def _folded(s, k_c, v_c, total, inverse, J: tl.constexpr):
    """The state [BV, K] at the end of a whole chunk."""
    high, low = erasing(k_c, total, inverse, J)
    ends = tl.arange(0, total.shape[0]) == total.shape[0] - 1
    if J == 1:
        last = tl.sum(tl.where(ends, total, 0.0), 0)
    else:
        last = tl.sum(tl.where(ends[:, None], total, 0.0), 0)[None, :]
    update = tl.trans(dot_wide_left(inverse, v_c)) - ask(s, tl.trans(high), tl.trans(low))
    return fold(s, update, k_c, tl.exp(last - total), tl.exp(last), J)


@triton.jit
def keep_behind(
    k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tickets, h, p0,
    first, drafts, slot, committed, edge, end, ring_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """New tokens behind the new edge to the ring, when all have read what stands there."""
    low, base = tl.maximum(committed, (end - drafts) // CHUNK * CHUNK), slot.to(tl.int64) * ring_len
    heads: tl.constexpr = H // G
    programs: tl.constexpr = heads * ((V + BV - 1) // BV) // TILES
    ticket = tickets + slot.to(tl.int64) * G + h // heads
    whole_group, mine = whose(ticket, edge, low, end, p0 == 0, programs, ring_len)
    h_0, count = tl.where(whole_group, h // heads * heads, h), tl.where(whole_group, heads, 1)
    for start in range(low, end, 16):
        token = (first + start - committed).to(tl.int64)
        for i in range(TILES):
            keep_values(v, v_records, h, p0 + i * BV, start, end, token, base, ring_len, v_len, H, V, BV)
        if mine:
            for i in range(count):
                keep_head(k, a, b, dt_bias, A, k_records, g_records, beta_records, h_0 + i, start, end, token,
                          base, ring_len, k_len, a_len, b_len, H, G, K, J)  # fmt: skip
