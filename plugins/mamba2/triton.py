"""Mamba2's recurrence on CUDA: chunks of the absolute grid, one arithmetic for prompts and decode.

A chunk with edge state S0 and a = cumsum(dt A) (Dao and Gu 2024, arXiv 2405.21060):
    y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
    S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
A token's bits depend on its chunk's places up to it: tiles have fixed shapes, absent tokens are zeros, and
multiply-adds are never contracted (enable_fp_fusion=False). Rows of a few tokens share a
program per some heads, whose states arrive while others are at work (`_step`, and `_pass` where they pass an
edge); a long row keeps a state in registers (`_scan`).
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import dot, dot_wide_left, dot_wide_right, softplus
from hemiola.plugins.gpu.recurrences import ages, take
from hemiola.plugins.gpu.rows import LONG, PASSES, STAYS, clear_dead_tokens, kind_of, load_row, rows_of_kind


@triton.jit(do_not_specialize=["clears", "num_rows", "num_tokens"])
def _step(
    x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, clears, num_rows,
    num_tokens,
    ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max, state_again, x_again, dt_again,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: one program per row and HB heads of a group, row by row; before them those that clear dead tokens.
    # Tile: state [BP, N] fp32, the next STAGES - 1 on their way; the edge's chunk, 16 of its places at once.
    # Traffic: the state once, records of x and dt once, B and C from L2 for every HB heads.
    pid = tl.program_id(0)
    blocks: tl.constexpr = (P + BP - 1) // BP
    if pid < clears:
        clear_dead_tokens(y, rows, num_rows, num_tokens, pid, H * P)
    else:
        row, h0 = (pid - clears) // (H // HB), (pid - clears) % (H // HB) * HB
        first, num, drafts, slot, committed, edge, _, _ = load_row(rows, row)
        kind = kind_of(num, drafts, committed, edge, CHUNK)
        if (num > 0) & (kind != LONG) & (committed < edge + CHUNK):
            g, end, base = h0 // (H // G), committed + num, slot.to(tl.int64) * ring_len
            p, n, c = tl.arange(0, BP), tl.arange(0, N), tl.arange(0, CHUNK)
            held = (edge > 0) & (committed > 0)
            xr, dtr = x_records + base * (H * P), dt_records + base * H
            Br = B_records + base * (G * N) + g * N
            token = (first + edge - committed).to(tl.int64)
            old, new = ages(edge + c, committed, end)
            place = (edge + c) % ring_len
            kept = new & (kind == STAYS)  # `_pass` still reads the records of a row that passes an edge
            q = committed - edge + tl.arange(0, 16)
            live = (q < CHUNK) & (edge + q < end)
            C_q = tl.load(
                C + g * N + token * C_len + q[:, None] * C_len + n[None, :], mask=live[:, None], other=0.0
            )
            B_c = take(Br, B + g * N + token * B_len, place, n, old, new, n < N, G * N, B_len)
            if h0 % (H // G) == 0:
                tl.store(Br + (place[:, None] * (G * N) + n[None, :]), B_c, mask=kept[:, None])
            scores = dot(B_c, tl.trans(C_q))
            # Scalar bases, and offsets that no iteration changes: address tiles would fill the registers.
            inner, to = p[:, None] * N + n[None, :], q[None, :] * (H * P) + p[:, None]
            dt_place, x_place = place * H, place[:, None] * (H * P) + p[None, :]
            slot_state = slot.to(tl.int64) * (H * P * N)
            for i in tl.range(HB * blocks, num_stages=STAGES):
                h, p0 = h0 + i // blocks, i % blocks * BP
                at, stored = h * P + p0, p < P - p0
                s = tl.load(state + (slot_state + at * N) + inner, mask=stored[:, None] & held, other=0.0)
                x_c = take(xr + at, x + token * x_len + at, place, p, old, new, stored, H * P, x_len)
                dt_new = _step_sizes(
                    dt + token * dt_len + h, tl.load(dt_bias + h), dt_min, dt_max, c, new, dt_len
                )
                dt_c = dt_new + tl.load(dtr + h + dt_place, mask=old, other=0.0)
                total = tl.cumsum(dt_c * tl.load(A + h), 0)
                out = _outputs(s, x_c, scores, C_q, dt_c, total, q, tl.load(D + h))
                tl.store(y + (token * (H * P) + at) + to, out.to(y.dtype.element_ty),
                         mask=live[None, :] & stored[:, None])  # fmt: skip
                tl.store(x_again + (base * (H * P) + at) + x_place, x_c, mask=kept[:, None] & stored[None, :])
                if p0 == 0:
                    tl.store(dt_again + (base * H + h) + dt_place, dt_new, mask=kept)
                if (committed == 0) & (kind == STAYS):
                    tl.store(state_again + (slot_state + at * N) + inner, tl.zeros((BP, N), tl.float32),
                             mask=stored[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _pass(
    x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, num_rows,
    ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max, state_again, x_again, dt_again,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out row and HB heads of a group, of the rows of few tokens that pass an edge.
    # Tile: state [BP, N] fp32, the next STAGES - 1 on their way; up to 16 new tokens behind the first edge.
    # Traffic: the state once more, one write per edge passed (and snapshot), records of x and dt once.
    before, programs = 0, tl.num_programs(0)
    for base in range(0, num_rows, 64):
        row, mine, rank, count = rows_of_kind(rows, base, num_rows, PASSES, PASSES, CHUNK)
        turn = (before + programs - 1 - tl.program_id(0)) // programs  # items go round all blocks of rows
        for item in range(tl.program_id(0) + turn * programs, before + count * (H // HB), programs):
            found = tl.sum(tl.where(mine & (rank == (item - before) // (H // HB)), row, 0), 0)
            _pass_row(
                x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, found,
                (item - before) % (H // HB) * HB, ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max,
                state_again, x_again, dt_again,
                H, P, G, N, CHUNK, BP, HB, STAGES,
            )  # fmt: skip
        before += count * (H // HB)


@triton.jit
def _pass_row(
    x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, row, h0,
    ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max, state_again, x_again, dt_again,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """States of HB heads at the edges passed, and outputs behind the first; `_step` gave those before it."""
    blocks: tl.constexpr = (P + BP - 1) // BP
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    g, end, base = h0 // (H // G), committed + num, slot.to(tl.int64) * ring_len
    new_edge = (end - drafts) // CHUNK * CHUNK
    low = tl.maximum(committed, new_edge)
    p, n, c = tl.arange(0, BP), tl.arange(0, N), tl.arange(0, CHUNK)
    held = (edge > 0) & (committed > 0)
    xr, Br, dtr = x_records + base * (H * P), B_records + base * (G * N) + g * N, dt_records + base * H
    token, token_2 = (first + edge - committed).to(tl.int64), (first + edge - committed).to(tl.int64) + CHUNK
    old, new = ages(edge + c, committed, end)
    old_2, new_2 = ages(edge + CHUNK + c, committed, end)
    place, place_2 = (edge + c) % ring_len, (edge + CHUNK + c) % ring_len
    q = tl.maximum(committed - edge - CHUNK, 0) + tl.arange(0, 16)
    live = (q < CHUNK) & (edge + CHUNK + q < end)
    C_q = tl.load(
        C + g * N + token_2 * C_len + q[:, None] * C_len + n[None, :], mask=live[:, None], other=0.0
    )
    B_c = take(Br, B + g * N + token * B_len, place, n, old, new, n < N, G * N, B_len)
    B_2 = take(Br, B + g * N + token_2 * B_len, place_2, n, old_2, new_2, n < N, G * N, B_len)
    scores = dot(B_2, tl.trans(C_q))
    inner, to = p[:, None] * N + n[None, :], q[None, :] * (H * P) + p[:, None]
    dt_place, x_place = place * H, place[:, None] * (H * P) + p[None, :]
    dt_place_2, x_place_2 = place_2 * H, place_2[:, None] * (H * P) + p[None, :]
    slot_state = slot.to(tl.int64) * (H * P * N)
    for i in tl.range(HB * blocks, num_stages=STAGES):
        h, p0 = h0 + i // blocks, i % blocks * BP
        at, stored = h * P + p0, p < P - p0
        s = tl.load(state + (slot_state + at * N) + inner, mask=stored[:, None] & held, other=0.0)
        a, bias, skip = tl.load(A + h), tl.load(dt_bias + h), tl.load(D + h)
        x_c = take(xr + at, x + token * x_len + at, place, p, old, new, stored, H * P, x_len)
        x_2 = take(xr + at, x + token_2 * x_len + at, place_2, p, old_2, new_2, stored, H * P, x_len)
        dt_c = _step_sizes(dt + token * dt_len + h, bias, dt_min, dt_max, c, new, dt_len)
        dt_c += tl.load(dtr + h + dt_place, mask=old, other=0.0)
        dt_2 = _step_sizes(dt + token_2 * dt_len + h, bias, dt_min, dt_max, c, new_2, dt_len)
        dt_2 += tl.load(dtr + h + dt_place_2, mask=old_2, other=0.0)
        total_2 = tl.cumsum(dt_2 * a, 0)
        kept = x_again + (base * (H * P) + at)
        tl.store(kept + x_place, x_c, mask=(new & (edge + c >= low))[:, None] & stored[None, :])
        tl.store(kept + x_place_2, x_2, mask=(new_2 & (edge + CHUNK + c >= low))[:, None] & stored[None, :])
        own = state_again + (slot_state + at * N)
        other = state_again + (snapshot.to(tl.int64) * (H * P * N) + at * N)
        s_1 = _fold(s, x_c, B_c, dt_c, tl.cumsum(dt_c * a, 0))
        _save(own, other, inner, s_1, stored[:, None], edge + CHUNK, new_edge, snapshot, snapshot_edge)
        if (new_edge == 0) & (committed == 0):
            tl.store(own + inner, tl.zeros((BP, N), tl.float32), mask=stored[:, None])
        # Not in a branch, though often needless: wgmma inside one gave a loop's later tiles wrong numbers.
        out = _outputs(s_1, x_2, scores, C_q, dt_2, total_2, q, skip)
        tl.store(y + (token_2 * (H * P) + at) + to, out.to(y.dtype.element_ty),
                 mask=live[None, :] & stored[:, None])  # fmt: skip
    _store_shared(B, dt, dt_bias, B_records, dt_records, tickets, h0, h0 >= 0, first, drafts, slot,
                  committed, edge, end,
                  ring_len, B_len, dt_len, dt_min, dt_max, H // HB, H, G, N, CHUNK, HB)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _scan(
    x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, num_rows,
    ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out row, head and BP channels of long rows.
    # Tile: state [BP, N] fp32 in registers from the row's edge to its last token, CHUNK tokens beside it.
    # Traffic: the row's x, dt and y once per head, B and C from L2 for H / G heads; the state at its ends.
    blocks: tl.constexpr = (P + BP - 1) // BP
    before, programs = 0, tl.num_programs(0)
    for base in range(0, num_rows, 64):
        row, mine, rank, count = rows_of_kind(rows, base, num_rows, LONG, LONG, CHUNK)
        turn = (before + programs - 1 - tl.program_id(0)) // programs
        for item in range(tl.program_id(0) + turn * programs, before + count * H * blocks, programs):
            inside = item - before
            found = tl.sum(tl.where(mine & (rank == inside // (H * blocks)), row, 0), 0)
            _scan_row(
                x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, found,
                inside // blocks % H, inside % blocks * BP,
                ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max, H, P, G, N, CHUNK, BP, STAGES,
            )  # fmt: skip
        before += count * H * blocks


@triton.jit
def _scan_row(
    x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, row, h, p0,
    ring_len, x_len, B_len, C_len, dt_len, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One head's BP channels from the row's edge to its last token, chunk after chunk."""
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    g, at, end, base = h // (H // G), h * P + p0, committed + num, slot.to(tl.int64) * ring_len
    new_edge = (end - drafts) // CHUNK * CHUNK
    p, n, c = tl.arange(0, BP), tl.arange(0, N), tl.arange(0, CHUNK)
    stored, inner = (p < P - p0)[:, None], p[:, None] * N + n[None, :]
    own = state + (slot.to(tl.int64) * (H * P * N) + at * N)
    other = state + (snapshot.to(tl.int64) * (H * P * N) + at * N)
    xr, Br, dtr = (
        x_records + base * (H * P) + at,
        B_records + base * (G * N) + g * N,
        dt_records + base * H + h,
    )
    a, bias, skip = tl.load(A + h), tl.load(dt_bias + h), tl.load(D + h)
    s = tl.load(own + inner, mask=stored & (edge > 0) & (committed > 0), other=0.0)
    if (new_edge == 0) & (committed == 0):
        tl.store(own + inner, s, mask=stored)
    for start in tl.range(edge, end, CHUNK, num_stages=STAGES):
        token = (first + start - committed).to(tl.int64)
        old, new = ages(start + c, committed, end)
        place = (start + c) % ring_len
        dt_c = _step_sizes(dt + token * dt_len + h, bias, dt_min, dt_max, c, new, dt_len)
        dt_c += tl.load(dtr + place * H, mask=old, other=0.0)
        x_c = take(xr, x + token * x_len + at, place, p, old, new, p < P - p0, H * P, x_len)
        B_c = take(Br, B + token * B_len + g * N, place, n, old, new, n < N, G * N, B_len)
        C_c = tl.load(
            C + g * N + token * C_len + c[:, None] * C_len + n[None, :], mask=new[:, None], other=0.0
        )
        total = tl.cumsum(dt_c * a, 0)
        out = _outputs(s, x_c, dot(B_c, tl.trans(C_c)), C_c, dt_c, total, c, skip)
        to = y + (token * (H * P) + at) + (c[None, :] * (H * P) + p[:, None])
        tl.store(to, out.to(y.dtype.element_ty), mask=new[None, :] & stored)
        s = _fold(s, x_c, B_c, dt_c, total)
        _save(own, other, inner, s, stored, start + CHUNK, new_edge, snapshot, snapshot_edge)
    low = tl.maximum(committed, new_edge)
    tl.debug_barrier()
    _keep(
        x + h * P,
        x_records + h * P,
        p0,
        first - committed + low,
        low,
        end,
        slot,
        x_len,
        ring_len,
        H * P,
        P,
        BP,
    )
    _store_shared(B, dt, dt_bias, B_records, dt_records, tickets, h, p0 == 0, first, drafts, slot,
                  committed, edge, end,
                  ring_len, B_len, dt_len, dt_min, dt_max, H * ((P + BP - 1) // BP), H, G, N, CHUNK,
                  1)  # fmt: skip


@triton.jit
def _outputs(s, x_c, scores, C_q, dt_c, total, q, skip):
    """[BP, 16] of the places q from the edge's state and the chunk's tokens up to each."""
    c = tl.arange(0, dt_c.shape[0])
    total_q = tl.sum(tl.where(c[:, None] == q[None, :], total[:, None], 0.0), 0)
    decay = tl.exp(total_q[None, :] - total[:, None]) * dt_c[:, None]
    weight = tl.where(c[:, None] <= q[None, :], scores * decay, 0.0)
    weight = tl.where(c[:, None] == q[None, :], weight + skip, weight)
    across = dot_wide_left(s, tl.trans(C_q)) * tl.exp(total_q)[None, :]
    return across + dot_wide_right(tl.trans(x_c), weight)


@triton.jit
def _fold(s, x_c, B_c, dt_c, total):
    """The state at the chunk's end."""
    c = tl.arange(0, dt_c.shape[0])
    last = tl.sum(tl.where(c == dt_c.shape[0] - 1, total, 0.0), 0)
    gain = tl.exp(last - total) * dt_c
    return s * tl.exp(last) + dot_wide_right(tl.trans(x_c), B_c.to(tl.float32) * gain[:, None])


@triton.jit
def _save(own, other, inner, s, stored, edge, new_edge, snapshot, snapshot_edge):
    """The state at this edge to the slot and to the snapshot, where it is theirs."""
    if edge == new_edge:
        tl.store(own + inner, s, mask=stored)
    if (snapshot != 0) & (edge == snapshot_edge) & (edge <= new_edge):
        tl.store(other + inner, s, mask=stored)


@triton.jit
def _step_sizes(dt, dt_bias, dt_min, dt_max, token, new, dt_len):
    """dt' of new tokens, 0 of others."""
    raw = tl.load(dt + token * dt_len, mask=new, other=0.0).to(tl.float32)
    final = tl.minimum(tl.maximum(softplus(raw + dt_bias), dt_min), dt_max)
    return tl.where(new, final, 0.0)


@triton.jit
def _store_shared(
    B, dt, dt_bias, B_records, dt_records, tickets, h0, mine, first, drafts, slot, committed, edge, end,
    ring_len, B_len, dt_len, dt_min, dt_max, programs,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """dt of HB heads and B of their group, of new tokens behind the new edge, to the ring.

    Where they overwrite records that other programs still read, the row's last program stores all of them.
    """
    low = tl.maximum(committed, (end - drafts) // CHUNK * CHUNK)
    source = first - committed + low
    tl.debug_barrier()
    if low < end:
        crowded = end - edge > ring_len
        if crowded:
            mine = _last_of(tickets + slot, programs)
        if mine:
            for i in range(tl.where(crowded, 0, h0), tl.where(crowded, H, h0 + HB)):
                _keep_dt(dt + i, dt_records + i, tl.load(dt_bias + i), dt_min, dt_max, source, low, end, slot,
                         dt_len, ring_len, H)  # fmt: skip
                if i % (H // G) == 0:
                    g = i // (H // G)
                    _keep(
                        B + g * N, B_records + g * N, 0, source, low, end, slot, B_len, ring_len, G * N, N, N
                    )


@triton.jit
def _last_of(ticket, num):
    """Whether all other programs of this row have read what they need; new records may then overwrite it."""
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == num - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def _keep_dt(
    dt, dt_records, dt_bias, dt_min, dt_max, source, low, end, slot, dt_len, ring_len, H: tl.constexpr
):
    """One head's dt' of tokens low .. end to their places in the ring."""
    for base in range(0, end - low, 16):
        step = base + tl.arange(0, 16)
        new = low + step < end
        final = _step_sizes(dt + source.to(tl.int64) * dt_len, dt_bias, dt_min, dt_max, step, new, dt_len)
        place = (low + step) % ring_len
        tl.store(dt_records + slot.to(tl.int64) * ring_len * H + place * H, final, mask=new)


@triton.jit
def _keep(
    new, records, column, source, low, end, slot, new_len, ring_len,
    LEN: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BW columns of tokens low .. end to their places in the ring."""
    columns = column + tl.arange(0, BW)
    for base in range(0, end - low, 16):
        step = base + tl.arange(0, 16)
        mask = (low + step < end)[:, None] & (columns < WIDTH)[None, :]
        place = (low + step) % ring_len
        value = tl.load(
            new + source.to(tl.int64) * new_len + (step[:, None] * new_len + columns[None, :]), mask=mask
        )
        at = records + slot.to(tl.int64) * ring_len * LEN + (place[:, None] * LEN + columns[None, :])
        tl.store(at, value, mask=mask)
