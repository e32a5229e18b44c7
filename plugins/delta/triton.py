"""The gated delta rule on CUDA, with a decay per head or per channel (KDA): chunks of the absolute grid.

A chunk with edge state S0 and G = cumsum(g) (arXiv 2412.06464, 2510.26692), absent tokens zeros:
    A_ts = beta_t sum_c k_tc k_sc exp(G_tc - G_sc), s < t;   T = (I + A)^-1 diag(beta)
    P_ts = sum_c q_tc k_sc exp(G_tc - G_sc), s <= t;         M = P T
    o    = (q exp(G) - M (k exp(G))) S0 + M v
    S1   = exp(G_C) S0 + (k exp(G_C - G))' U,   U = T v - T (k exp(G)) S0
An output reads the state once, through one vector per token: decode needs neither U nor a product with all
keys. (I + A)^-1 grows from blocks of 1 to C, [[X, 0], [E, Y]]^-1 = [[X^-1, 0], [-Y^-1 E X^-1, Y^-1]], so a
row depends on earlier rows only, and bits depend on no layout. Multiply-adds are never contracted.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import dot, dot_wide, dot_wide_left, softplus
from hemiola.plugins.gpu.rows import LONG, PASSES, STAYS, clear_dead_tokens, kind_of, load_row, rows_of_kind


@triton.jit(do_not_specialize=["clears", "num_rows", "num_tokens"])
def _step(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o, clears,
    num_rows,
    num_tokens, ring_len, q_len, k_len, v_len, a_len, b_len, state_again,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: one program per row and TILES tiles of a key head, row by row; first those that clear dead tokens.
    # Tile: state [K, BV] fp32, the next STAGES - 1 on their way; up to 16 new tokens; no state is stored.
    # Traffic: the state once, records of v and g once per tile and head, k and q once per program.
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    programs: tl.constexpr = H * blocks // TILES
    if pid < clears:
        clear_dead_tokens(o, rows, num_rows, num_tokens, pid, H * V)
    else:
        row, tile_0 = (pid - clears) // programs, (pid - clears) % programs * TILES
        first, num, drafts, slot, committed, edge, _, _ = load_row(rows, row)
        if (num > 0) & (kind_of(num, drafts, committed, edge, CHUNK) == STAYS):
            g, end, base = tile_0 // (H // G * blocks), committed + num, slot.to(tl.int64) * ring_len
            n, p, c = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, CHUNK)
            held = (edge > 0) & (committed > 0)
            token = (first + edge - committed).to(tl.int64)
            old, new = _ages(edge + c, committed, end)
            place = (edge + c) % ring_len
            t = committed - edge + tl.arange(0, 16)
            live = edge + t < end
            q_t = tl.load(
                q + g * K + token * q_len + t[:, None] * q_len + n[None, :], mask=live[:, None], other=0.0
            )
            k_c = _take(k_records + base * (G * K) + g * K, k + g * K + token * k_len, place, n, old, new,
                        n < K,
                        G * K, k_len)  # fmt: skip
            if tile_0 % (H // G * blocks) == 0:
                kept_k = k_records + base * (G * K) + g * K + (place[:, None] * (G * K) + n[None, :])
                tl.store(kept_k, k_c, mask=new[:, None])
            inner, to = n[:, None] * V + p[None, :], t[:, None] * (H * V) + p[None, :]
            v_place = place[:, None] * (H * V) + p[None, :]
            slot_state = slot.to(tl.int64) * (H * K * V)
            for i in tl.range(TILES, num_stages=STAGES):
                h, p0 = (tile_0 + i) // blocks, (tile_0 + i) % blocks * BV
                at, stored = h * V + p0, p < V - p0
                s = tl.load(
                    state + (slot_state + h * (K * V) + p0) + inner, mask=stored[None, :] & held, other=0.0
                )
                v_c = _take(v_records + base * (H * V) + at, v + token * v_len + at, place, p, old, new,
                            stored,
                            H * V, v_len)  # fmt: skip
                g_c, beta_c = _gates(a + token * a_len + h * J, b + token * b_len + h, dt_bias + h * J,
                                     tl.load(A + h),
                                     g_records + (base * H + h) * J, beta_records + base * H + h, place,
                                     old, new,
                                     a_len, b_len, H, K, J)  # fmt: skip
                total = tl.cumsum(g_c, 0)
                solved = _solved(k_c, total, beta_c, J)
                out = _outputs(q_t, k_c, v_c, s, total, solved, t, J)
                tl.store(o + (token * (H * V) + at) + to, out.to(o.dtype.element_ty),
                         mask=live[:, None] & stored[None, :])  # fmt: skip
                tl.store(v_records + base * (H * V) + at + v_place, v_c, mask=new[:, None] & stored[None, :])
                if p0 == 0:
                    _keep_gates(g_records + (base * H + h) * J, beta_records + base * H + h, g_c, beta_c,
                                place, new,
                                H, K, J)  # fmt: skip
                if committed == 0:
                    zero = tl.zeros((K, BV), tl.float32)
                    tl.store(
                        state_again + (slot_state + h * (K * V) + p0) + inner, zero, mask=stored[None, :]
                    )


@triton.jit(do_not_specialize=["num_rows"])
def _scan(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o, tickets,
    num_rows,
    ring_len, q_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out row, head and BV channels of the rows that `_step` leaves.
    # Tile: state [K, BV] fp32 in registers from the row's edge to its last token, CHUNK tokens beside it.
    # Traffic: the row's v, g and o once per tile and head, q and k from L2; the state at its ends.
    blocks: tl.constexpr = (V + BV - 1) // BV
    before, programs = 0, tl.num_programs(0)
    for base in range(0, num_rows, 64):
        row, mine, rank, count = rows_of_kind(rows, base, num_rows, PASSES, LONG, CHUNK)
        turn = (before + programs - 1 - tl.program_id(0)) // programs  # items go round all blocks of rows
        for item in range(tl.program_id(0) + turn * programs, before + count * H * blocks, programs):
            inside = item - before
            found = tl.sum(tl.where(mine & (rank == inside // (H * blocks)), row, 0), 0)
            _scan_row(
                q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o,
                tickets,
                found, inside // blocks % H, inside % blocks * BV, ring_len, q_len, k_len, v_len, a_len,
                b_len,
                H, G, K, V, J, CHUNK, BV,
            )  # fmt: skip
        before += count * H * blocks


@triton.jit
def _scan_row(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o, tickets, row,
    h, p0,
    ring_len, q_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """One head's BV channels from the row's edge to its last token, chunk after chunk."""
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    g, at, end, base = h // (H // G), h * V + p0, committed + num, slot.to(tl.int64) * ring_len
    new_edge = (end - drafts) // CHUNK * CHUNK
    n, p, c = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, CHUNK)
    stored, inner = p < V - p0, n[:, None] * V + p[None, :]
    own = state + (slot.to(tl.int64) * (H * K * V) + h * (K * V) + p0)
    other = state + (snapshot.to(tl.int64) * (H * K * V) + h * (K * V) + p0)
    s = tl.load(own + inner, mask=stored[None, :] & (edge > 0) & (committed > 0), other=0.0)
    if (new_edge == 0) & (committed == 0):
        tl.store(own + inner, s, mask=stored[None, :])
    for start in range(edge, end, CHUNK):
        token = (first + start - committed).to(tl.int64)
        old, new = _ages(start + c, committed, end)
        place = (start + c) % ring_len
        k_c = _take(k_records + base * (G * K) + g * K, k + g * K + token * k_len, place, n, old, new, n < K,
                    G * K, k_len)  # fmt: skip
        v_c = _take(
            v_records + base * (H * V) + at, v + token * v_len + at, place, p, old, new, stored, H * V, v_len
        )
        g_c, beta_c = _gates(a + token * a_len + h * J, b + token * b_len + h, dt_bias + h * J,
                             tl.load(A + h),
                             g_records + (base * H + h) * J, beta_records + base * H + h, place, old, new,
                             a_len, b_len, H, K, J)  # fmt: skip
        q_c = tl.load(
            q + g * K + token * q_len + c[:, None] * q_len + n[None, :], mask=new[:, None], other=0.0
        )
        total = tl.cumsum(g_c, 0)
        solved = _solved(k_c, total, beta_c, J)
        if start + CHUNK > committed:
            out = _outputs(q_c, k_c, v_c, s, total, solved, c, J)
            to = o + (token * (H * V) + at) + (c[:, None] * (H * V) + p[None, :])
            tl.store(to, out.to(o.dtype.element_ty), mask=new[:, None] & stored[None, :])
        if start + CHUNK <= new_edge or start + CHUNK < end:
            s = _fold(s, k_c, v_c, total, solved, J)
            if start + CHUNK == new_edge:
                tl.store(own + inner, s, mask=stored[None, :])
            if (snapshot != 0) & (start + CHUNK == snapshot_edge) & (snapshot_edge <= new_edge):
                tl.store(other + inner, s, mask=stored[None, :])
    _store_records(k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tickets, h, p0,
                   first, drafts, slot, committed, edge, end, ring_len, k_len, v_len, a_len, b_len,
                   H, G, K, V, J, CHUNK, BV)  # fmt: skip


@triton.jit
def _ages(position, committed, end):
    """Which tokens are records, which new."""
    return position < committed, (position >= committed) & (position < end)


@triton.jit
def _take(records, tokens, place, column, old, new, real, record_len: tl.constexpr, token_len):
    """The chunk's lines: records, then new tokens, zeros where there is neither."""
    c = tl.arange(0, place.shape[0])
    held = records + (place[:, None] * record_len + column[None, :])
    brought = tokens + (c[:, None] * token_len + column[None, :])
    return tl.load(
        tl.where(old[:, None], held, brought), mask=(old | new)[:, None] & real[None, :], other=0.0
    )


@triton.jit
def _gates(
    a, b, dt_bias, A, g_records, beta_records, place, old, new, a_len, b_len,
    H: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Log decay [CHUNK] or [CHUNK, K], and beta [CHUNK], of records and new tokens, 0 elsewhere."""
    c = tl.arange(0, place.shape[0])
    raw_beta = tl.load(b + c * b_len, mask=new, other=0.0).to(tl.float32)
    beta = tl.where(
        new, 1.0 / (1.0 + tl.exp(-raw_beta)), tl.load(beta_records + place * H, mask=old, other=0.0)
    )
    if J == 1:
        raw = tl.load(a + c * a_len, mask=new, other=0.0).to(tl.float32)
        decay = A * softplus(raw + tl.load(dt_bias))
        decay = tl.where(new, decay, tl.load(g_records + place * H, mask=old, other=0.0))
    else:
        n = tl.arange(0, K)
        raw = tl.load(a + (c[:, None] * a_len + n[None, :]), mask=new[:, None], other=0.0).to(tl.float32)
        decay = A * softplus(raw + tl.load(dt_bias + n)[None, :])
        held = tl.load(g_records + (place[:, None] * (H * J) + n[None, :]), mask=old[:, None], other=0.0)
        decay = tl.where(new[:, None], decay, held)
    return decay, beta


@triton.jit
def _keep_gates(
    g_records, beta_records, decay, beta, place, new, H: tl.constexpr, K: tl.constexpr, J: tl.constexpr
):
    """g and beta of new tokens to their places in the ring."""
    tl.store(beta_records + place * H, beta, mask=new)
    if J == 1:
        tl.store(g_records + place * H, decay, mask=new)
    else:
        tl.store(g_records + (place[:, None] * (H * J) + tl.arange(0, K)[None, :]), decay, mask=new[:, None])


@triton.jit
def _row_of(total, t):
    """Lines t of the running sum."""
    c = tl.arange(0, total.shape[0])
    if len(total.shape) == 1:
        return tl.sum(tl.where(c[None, :] == t[:, None], total[None, :], 0.0), 1)
    else:
        lines = tl.minimum(t, total.shape[0] - 1)
        return tl.gather(total, tl.broadcast_to(lines[:, None], (t.shape[0], total.shape[1])), 0)


@triton.jit
def _met(left, t, k_c, total, J: tl.constexpr):
    """sum_c left_tc k_sc exp(G_tc - G_sc) for s <= t, [t, CHUNK]; elsewhere anything finite.

    With a decay per channel, s and t meet in the smallest aligned block that has them in different halves;
    the first half's last line is the reference of both exponentials: none of them is above 1.
    """
    CHUNK: tl.constexpr = total.shape[0]
    c = tl.arange(0, CHUNK)
    if J == 1:
        span = _row_of(total, t)[:, None] - total[None, :]
        return dot(left, tl.trans(k_c)) * tl.exp(tl.minimum(span, 0.0))
    else:
        met = tl.where(c[None, :] == t[:, None], dot(left, tl.trans(k_c)), 0.0)
        total_t = _row_of(total, t)
        for level in tl.static_range(0, 6):
            if (1 << level) < CHUNK:
                met = _meet(met, left, t, k_c, total, total_t, 1 << level)
        return met


@triton.jit
def _meet(met, left, t, k_c, total, total_t, HALF: tl.constexpr):
    """The pairs that stand in different halves of a block of 2 HALF places."""
    c = tl.arange(0, total.shape[0])
    late, early = (t // HALF) % 2 == 1, (c // HALF) % 2 == 0
    reach = total_t - _row_of(total, t // (2 * HALF) * (2 * HALF) + HALF - 1)
    remain = _row_of(total, c // (2 * HALF) * (2 * HALF) + HALF - 1) - total
    decayed = left.to(tl.float32) * tl.exp(tl.where(late[:, None], reach, -1e30))
    awaited = k_c.to(tl.float32) * tl.exp(tl.where(early[:, None], remain, -1e30))
    same = (t // (2 * HALF))[:, None] == (c // (2 * HALF))[None, :]
    return tl.where(same & late[:, None] & early[None, :], dot_wide(decayed, tl.trans(awaited)), met)


@triton.jit
def _solved(k_c, total, beta_c, J: tl.constexpr):
    """T = (I + A)^-1 diag(beta), [CHUNK, CHUNK]."""
    CHUNK: tl.constexpr = total.shape[0]
    c = tl.arange(0, CHUNK)
    t, s = c[:, None], c[None, :]
    pairs = tl.where(s < t, _met(k_c, c, k_c, total, J) * beta_c[:, None], 0.0)
    inverse = tl.where(s == t, 1.0, tl.where((s // 2 == t // 2) & (s < t), -pairs, 0.0))
    for level in tl.static_range(1, 6):
        if (1 << level) < CHUNK:
            inverse = _grow(inverse, pairs, t, s, 1 << level)
    return inverse * beta_c[None, :]


@triton.jit
def _grow(inverse, pairs, t, s, HALF: tl.constexpr):
    """The inverse of blocks of 2 HALF places from that of blocks of HALF."""
    between = (t // (2 * HALF) == s // (2 * HALF)) & ((t // HALF) % 2 == 1) & ((s // HALF) % 2 == 0)
    left = tl.dot(inverse, tl.where(between, pairs, 0.0), input_precision="tf32x3")
    return inverse - tl.dot(left, inverse, input_precision="tf32x3")


@triton.jit
def _outputs(q_t, k_c, v_c, s, total, solved, t, J: tl.constexpr):
    """[t, BV] of the places t from the edge's state and the chunk's tokens up to each."""
    c = tl.arange(0, total.shape[0])
    met = tl.where(c[None, :] <= t[:, None], _met(q_t, t, k_c, total, J), 0.0)
    mixed = tl.dot(met, solved, input_precision="tf32x3")
    reach = tl.exp(_row_of(total, t))
    if J == 1:
        query = q_t.to(tl.float32) * reach[:, None] - dot_wide_left(mixed * tl.exp(total)[None, :], k_c)
    else:
        query = q_t.to(tl.float32) * reach - dot_wide(mixed, k_c.to(tl.float32) * tl.exp(total))
    return dot_wide(query, s) + dot_wide_left(mixed, v_c)


@triton.jit
def _fold(s, k_c, v_c, total, solved, J: tl.constexpr):
    """The state at the chunk's end."""
    last = tl.sum(
        tl.where((tl.arange(0, total.shape[0]) == total.shape[0] - 1)[:, None], _lines(total), 0.0), 0
    )
    if J == 1:
        keys = dot_wide_left(solved * tl.exp(total)[None, :], k_c)
        remain = k_c.to(tl.float32) * tl.exp(last[None, :] - total[:, None])
        decay = tl.exp(last)[None, :]
    else:
        keys = dot_wide(solved, k_c.to(tl.float32) * tl.exp(total))
        remain = k_c.to(tl.float32) * tl.exp(last[None, :] - total)
        decay = tl.exp(last)[:, None]
    update = dot_wide_left(solved, v_c) - dot_wide(keys, s)
    return s * decay + dot_wide(tl.trans(remain), update)


@triton.jit
def _lines(total):
    """[CHUNK, 1] or [CHUNK, K]."""
    if len(total.shape) == 1:
        return total[:, None]
    else:
        return total


@triton.jit
def _store_records(
    k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tickets, h, p0, first, drafts,
    slot,
    committed, edge, end, ring_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """New tokens behind the new edge to the ring: v of these channels, gates of the head, k of its group.

    Where they overwrite records that others still read, the row's last program stores all k and gates.
    """
    low = tl.maximum(committed, (end - drafts) // CHUNK * CHUNK)
    tl.debug_barrier()
    if low < end:
        base, token = slot.to(tl.int64) * ring_len, (first - committed + low).to(tl.int64)
        for start in range(0, end - low, 16):
            step = start + tl.arange(0, 16)
            new, place = low + step < end, (low + step) % ring_len
            p = p0 + tl.arange(0, BV)
            mask = new[:, None] & (p < V)[None, :]
            value = tl.load(v + (token * v_len + h * V) + (step[:, None] * v_len + p[None, :]), mask=mask)
            tl.store(
                v_records + (base * H + h) * V + (place[:, None] * (H * V) + p[None, :]), value, mask=mask
            )
        crowded = end - edge > ring_len
        mine = p0 == 0
        if crowded:
            mine = _last_of(tickets + slot, H * ((V + BV - 1) // BV))
        if mine:
            lo, hi = tl.where(crowded, 0, h), tl.where(crowded, H, h + 1)
            for i in range(lo, hi):
                for start in range(0, end - low, 16):
                    step = start + tl.arange(0, 16)
                    new, place = low + step < end, (low + step) % ring_len
                    at = token + start
                    decay, beta = _gates(a + at * a_len + i * J, b + at * b_len + i, dt_bias + i * J,
                                         tl.load(A + i),
                                         g_records, beta_records, place, new & False, new, a_len, b_len, H,
                                         K, J)  # fmt: skip
                    _keep_gates(g_records + (base * H + i) * J, beta_records + base * H + i, decay, beta,
                                place, new,
                                H, K, J)  # fmt: skip
                    if i % (H // G) == 0:
                        n, g = tl.arange(0, K), i // (H // G)
                        source = k + (token * k_len + g * K) + (step[:, None] * k_len + n[None, :])
                        value_k = tl.load(source, mask=new[:, None])
                        kept = k_records + (base * G + g) * K + (place[:, None] * (G * K) + n[None, :])
                        tl.store(kept, value_k, mask=new[:, None])


@triton.jit
def _last_of(ticket, num):
    """Whether all other programs of this row have read what they need; new records may then overwrite it."""
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == num - 1
    if last:
        tl.store(ticket, 0)
    return last
