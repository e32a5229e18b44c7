"""What a chunk of the gated delta rule computes without its state.

(I + A)^-1 grows from blocks of 2 to C, [[X, 0], [E, Y]]^-1 = [[X^-1, 0], [-Y^-1 E X^-1, Y^-1]], so a row
depends on earlier rows only, and bits depend on no layout.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import dot, dot_wide, dot_wide_left, halves, once, softplus
from hemiola.plugins.gpu.recurrences import ages, places, take


@triton.jit
def solve(
    q, k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, query, mixed,
    h, start, first, slot, committed, end, ring_len, q_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """A chunk's keys, values and T; stores queries that have met the keys, and values mixed for them."""
    g, base, token = h // (H // G), slot.to(tl.int64) * ring_len, (first + start - committed).to(tl.int64)
    n, p, c = tl.arange(0, K), tl.arange(0, triton.next_power_of_2(V)), tl.arange(0, CHUNK)
    old, new = ages(start + c, committed, end)
    place = places(start, ring_len, CHUNK)
    g_c, beta_c = gates(a + token * a_len + h * J, b + token * b_len + h, dt_bias + h * J, tl.load(A + h),
                        g_records + (base * H + h) * J, beta_records + base * H + h, place, old, new,
                        a_len, b_len, H, K, J)  # fmt: skip
    k_c = take(k_records + base * (G * K) + g * K, k + g * K + token * k_len, place, n, old, new, n < K,
               G * K, k_len)  # fmt: skip
    q_c = tl.load(q + g * K + token * q_len + c[:, None] * q_len + n[None, :], mask=new[:, None], other=0.0)
    v_c = take(v_records + (base * H + h) * V, v + token * v_len + h * V, place, p, old, new, p < V,
               H * V, v_len)  # fmt: skip
    if KEEPS:
        of_values = v_records + (base * H + h) * V + (place[:, None] * (H * V) + p[None, :])
        tl.store(of_values, v_c, mask=new[:, None] & (p < V)[None, :])
        keep_gates(g_records + (base * H + h) * J, beta_records + base * H + h, g_c, beta_c, place, new,
                   H, K, J)  # fmt: skip
        if h % (H // G) == 0:
            of_keys = k_records + base * (G * K) + g * K + (place[:, None] * (G * K) + n[None, :])
            tl.store(of_keys, k_c, mask=new[:, None])
    total, inverse, mix = solved(q_c, k_c, g_c, beta_c, J)
    to_values = mixed + (token * H + h) * V + (c[:, None] * (H * V) + p[None, :])
    tl.store(to_values, dot_wide_left(mix, v_c), mask=new[:, None] & (p < V)[None, :])
    high, low = asking(q_c, k_c, total, mix, J)
    to = query + (token * H + h) * (2 * K) + (c[:, None] * (2 * H * K) + n[None, :])
    tl.store(to, high, mask=new[:, None])
    tl.store(to + K, low, mask=new[:, None])
    return k_c, v_c, total, inverse


@triton.jit
def solved(q_c, k_c, g_c, beta_c, J: tl.constexpr):
    """G, T, and M = P T."""
    c = tl.arange(0, k_c.shape[0])
    total = tl.cumsum(g_c, 0)
    inverse, turned = _inverse(k_c, total, beta_c, J)
    met = tl.where(c[None, :] <= c[:, None], _met(q_c, k_c, total, J), 0.0)
    return total, inverse, dot_wide(met, tl.trans(turned), k_c.dtype)


@triton.jit
def asking(q_c, k_c, total, mix, J: tl.constexpr):
    """q exp(G) - M (k exp(G)) in two halves."""
    if J == 1:
        reach = tl.broadcast_to(tl.exp(total)[:, None], (total.shape[0], k_c.shape[1]))
        erased = dot_wide_left(mix * tl.exp(total)[None, :], k_c)
    else:
        reach = tl.exp(total)
        erased = dot_wide(mix, k_c.to(tl.float32) * reach, k_c.dtype)
    return halves(tl.fma(q_c.to(tl.float32), reach, -erased), q_c.dtype)


@triton.jit
def erasing(k_c, total, inverse, J: tl.constexpr):
    """T (k exp(G)) in two halves."""
    if J == 1:
        return halves(dot_wide_left(inverse * tl.exp(total)[None, :], k_c), k_c.dtype)
    else:
        return halves(dot_wide(inverse, k_c.to(tl.float32) * tl.exp(total), k_c.dtype), k_c.dtype)


@triton.jit
def store_fold(
    keys, solved_keys, solved_values, totals, line, h, k_c, v_c, total, inverse,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """What a whole chunk does to the state: k, T (k exp(G)), T v and G."""
    n, p = tl.arange(0, K), tl.arange(0, v_c.shape[1])
    high, low = erasing(k_c, total, inverse, J)
    if J == 1:
        tl.store(totals + line * H + h, total)
    else:
        tl.store(totals + line[:, None] * (H * K) + (h * K + n[None, :]), total)
    to = solved_keys + line[:, None] * (2 * H * K) + (h * (2 * K) + n[None, :])
    tl.store(to, high)
    tl.store(to + K, low)
    to_values = solved_values + line[:, None] * (H * V) + (h * V + p[None, :])
    tl.store(to_values, dot_wide_left(inverse, v_c), mask=(p < V)[None, :])
    if h % (H // G) == 0:
        tl.store(keys + line[:, None] * (G * K) + (h // (H // G) * K + n[None, :]), k_c)


@triton.jit
def lines_of(start, edge, committed, first, row, num_tokens, ring_len, CHUNK: tl.constexpr):
    """Where what a chunk does stands."""
    return line_of(start, edge, committed, first, row, num_tokens, ring_len, CHUNK) + tl.arange(0, CHUNK)


@triton.jit
def line_of(start, edge, committed, first, row, num_tokens, ring_len, CHUNK: tl.constexpr):
    """The first of a chunk's lines: by row where the chunk has records, else by token."""
    held = (ring_len + CHUNK - 1) // CHUNK * CHUNK
    token, kept = (first + start - committed).to(tl.int64), row.to(tl.int64) * held + (start - edge)
    return tl.where(start < committed, num_tokens + kept, token)


@triton.jit
def gates(
    a, b, dt_bias, A, g_records, beta_records, place, old, new, a_len, b_len,
    H: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Log decay [CHUNK] or [CHUNK, K], and beta [CHUNK], of records and new tokens, 0 elsewhere."""
    c = tl.arange(0, place.shape[0])
    raw_beta = tl.load(b + c * b_len, mask=new, other=0.0).to(tl.float32)
    held_beta = tl.load(beta_records + place * H, mask=old, other=0.0)
    if J == 1:
        raw = tl.load(a + c * a_len, mask=new, other=0.0).to(tl.float32)
        held = tl.load(g_records + place * H, mask=old, other=0.0)
        decay = tl.where(new, A * softplus(raw + tl.load(dt_bias)), held)
    else:
        n = tl.arange(0, K)
        raw = tl.load(a + (c[:, None] * a_len + n[None, :]), mask=new[:, None], other=0.0).to(tl.float32)
        held = tl.load(g_records + (place[:, None] * (H * J) + n[None, :]), mask=old[:, None], other=0.0)
        decay = tl.where(new[:, None], A * softplus(raw + tl.load(dt_bias + n)[None, :]), held)
    return decay, once(tl.where(new, 1.0 / (1.0 + tl.exp(-raw_beta)), held_beta))


@triton.jit
def keep_gates(
    g_records, beta_records, decay, beta, place, new, H: tl.constexpr, K: tl.constexpr, J: tl.constexpr
):
    """g and beta of new tokens to their places in the ring."""
    tl.store(beta_records + place * H, beta, mask=new)
    if J == 1:
        tl.store(g_records + place * H, decay, mask=new)
    else:
        tl.store(g_records + (place[:, None] * (H * J) + tl.arange(0, K)[None, :]), decay, mask=new[:, None])


@triton.jit
def _met(left, k_c, total, J: tl.constexpr):
    """sum_c left_tc k_sc exp(G_tc - G_sc) for s <= t, [CHUNK, CHUNK]; elsewhere anything finite.

    With a decay per channel, s and t meet in the smallest aligned block that has them in different halves;
    the first half's last line is the reference of both exponentials: none of them is above 1.
    """
    CHUNK: tl.constexpr = total.shape[0]
    c = tl.arange(0, CHUNK)
    if J == 1:
        span = total[:, None] - total[None, :]
        return dot(left, tl.trans(k_c)) * tl.exp(tl.minimum(span, 0.0))
    else:
        met = tl.where(c[None, :] == c[:, None], dot(left, tl.trans(k_c)), 0.0)
        for level in tl.static_range(0, 6):
            if (1 << level) < CHUNK:
                met = _meet(met, left, k_c, total, 1 << level)
        return met


@triton.jit
def _meet(met, left, k_c, total, HALF: tl.constexpr):
    """The pairs that stand in different halves of a block of 2 HALF places."""
    c = tl.arange(0, total.shape[0])
    late, early = (c // HALF) % 2 == 1, (c // HALF) % 2 == 0
    lines = tl.broadcast_to((c // (2 * HALF) * (2 * HALF) + HALF - 1)[:, None], total.shape)
    turn = tl.gather(total, lines, 0)
    decayed = left.to(tl.float32) * tl.exp(tl.where(late[:, None], total - turn, -1e30))
    awaited = k_c.to(tl.float32) * tl.exp(tl.where(early[:, None], turn - total, -1e30))
    same = (c // (2 * HALF))[:, None] == (c // (2 * HALF))[None, :]
    apart = same & late[:, None] & early[None, :]
    return tl.where(apart, dot_wide(decayed, tl.trans(awaited), k_c.dtype), met)


@triton.jit
def _inverse(k_c, total, beta_c, J: tl.constexpr):
    """T = (I + A)^-1 diag(beta), [CHUNK, CHUNK], and its transpose: neither as operand changes layout."""
    CHUNK: tl.constexpr = total.shape[0]
    c = tl.arange(0, CHUNK)
    t, s = c[:, None], c[None, :]
    met = _met(k_c, k_c, total, J)
    pairs = tl.where(s < t, met * beta_c[:, None], 0.0)
    turned_pairs = tl.where(t < s, _turned_met(k_c, met, total, J) * beta_c[None, :], 0.0)
    near = t // 2 == s // 2
    inverse = tl.where(s == t, 1.0, tl.where(near, -pairs, 0.0))
    turned = tl.where(s == t, 1.0, tl.where(near, -turned_pairs, 0.0))
    for level in tl.static_range(1, 6):
        if (1 << level) < CHUNK:
            inverse, turned = _grow(inverse, turned, turned_pairs, t, s, 1 << level, k_c.dtype)
    return inverse * beta_c[None, :], turned * beta_c[:, None]


@triton.jit
def _turned_met(k_c, met, total, J: tl.constexpr):
    """The transpose of `_met` of keys with keys."""
    if J == 1:
        span = total[None, :] - total[:, None]
        return dot(k_c, tl.trans(k_c)) * tl.exp(tl.minimum(span, 0.0))
    else:
        return tl.trans(met)


@triton.jit
def _grow(inverse, turned, turned_pairs, t, s, HALF: tl.constexpr, dtype: tl.constexpr):
    """The inverse of blocks of 2 HALF places from that of blocks of HALF."""
    between = (t // (2 * HALF) == s // (2 * HALF)) & ((s // HALF) % 2 == 1) & ((t // HALF) % 2 == 0)
    left = dot_wide(inverse, tl.trans(tl.where(between, turned_pairs, 0.0)), dtype)
    return inverse - dot_wide(left, tl.trans(turned), dtype), turned - dot_wide(turned, tl.trans(left), dtype)
