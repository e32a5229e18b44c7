"""Mamba2's recurrence on CUDA: chunks of the absolute grid, one arithmetic for prompts and decode.

A chunk with edge state S0 and a = cumsum(dt A) (Dao and Gu 2024, arXiv 2405.21060):
    y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
    S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
A token's bits depend on its chunk's places up to it: tiles have fixed shapes, absent tokens are zeros, and
multiply-adds are never contracted (enable_fp_fusion=False). Rows of a few tokens share a
program per some heads, whose states arrive while others are at work (`_step`, for which `_weigh` has summed
up decays); a long row keeps a state in registers (`_scan`).
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import dot, dot_wide_left, dot_wide_right, softplus
from hemiola.plugins.gpu.recurrences import ages, take, whose
from hemiola.plugins.gpu.rows import (
    LONG,
    PASSES,
    STAYS,
    clear_dead_tokens,
    kind_of,
    load_row,
    passing_first,
    rows_of_kind,
)


@triton.jit(do_not_specialize=["clears", "num_rows", "num_tokens"])
def _weigh(
    dt, dt_bias, A, dt_records, rows, y, sizes, order, clears, num_rows, num_tokens,
    ring_len, dt_len, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # Grid: programs that clear dead tokens, one that orders rows, then one per row and HEADS heads.
    # Tile: the places of a head's chunk, and of the next one where the row passes an edge.
    # Traffic: dt and its records once; to L2 a step size and a sum of decays for each place.
    pid = tl.program_id(0)
    if pid < clears:
        clear_dead_tokens(y, rows, num_rows, num_tokens, pid, H * P)
    elif pid == clears:
        passing_first(order, rows, num_rows, CHUNK, False)
    else:
        row, h0 = (pid - clears - 1) // (H // HEADS), (pid - clears - 1) % (H // HEADS) * HEADS
        first, num, drafts, slot, committed, edge, _, _ = load_row(rows, row)
        kind = kind_of(num, drafts, committed, edge, CHUNK)
        if (num > 0) & (kind != LONG):
            end, base, c = committed + num, slot.to(tl.int64) * ring_len, tl.arange(0, CHUNK)
            low = tl.maximum(committed, (end - drafts) // CHUNK * CHUNK)
            token = (first + edge - committed).to(tl.int64)
            place, place_2 = (edge + c) % ring_len, (edge + CHUNK + c) % ring_len
            old, new = ages(edge + c, committed, end)
            old_2, new_2 = ages(edge + CHUNK + c, committed, end)
            for h in range(h0, h0 + HEADS):
                a, bias, held = tl.load(A + h), tl.load(dt_bias + h), dt_records + base * H + h
                to, raw = sizes + (row.to(tl.int64) * H + h) * (4 * CHUNK) + c, dt + token * dt_len + h
                size = _step_sizes(raw, bias, dt_min, dt_max, c, new, dt_len)
                dt_c = size + tl.load(held + place * H, mask=old, other=0.0)
                tl.store(to, dt_c)
                tl.store(to + CHUNK, tl.cumsum(dt_c * a, 0))
                if kind == PASSES:
                    size_2 = _step_sizes(raw + CHUNK * dt_len, bias, dt_min, dt_max, c, new_2, dt_len)
                    dt_c = size_2 + tl.load(held + place_2 * H, mask=old_2, other=0.0)
                    tl.store(to + 2 * CHUNK, dt_c)
                    tl.store(to + 3 * CHUNK, tl.cumsum(dt_c * a, 0))
                    tl.debug_barrier()  # where this stores, records were read
                    tl.store(held + place_2 * H, size_2, mask=new_2 & (edge + CHUNK + c >= low))
                tl.store(held + place * H, size, mask=new & (edge + c >= low))


@triton.jit
def _step(
    x, B, C, D, state, x_records, B_records, rows, y, sizes, order, tickets,
    ring_len, x_len, B_len, C_len, state_again, x_again,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HB: tl.constexpr, STAGES: tl.constexpr, PASS_STAGES: tl.constexpr,
):  # fmt: skip
    # Grid: one program per row and HB heads of a group, row by row, those first that pass an edge.
    # Tile: state [BP, N] fp32, the next STAGES - 1 on their way; the edge's chunk, 16 of its places at once.
    # Traffic: the state once, and its fold where a row passes an edge; records of x once; B and C from L2.
    row, h0 = tl.load(order + tl.program_id(0) // (H // HB)), tl.program_id(0) % (H // HB) * HB
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    kind = kind_of(num, drafts, committed, edge, CHUNK)
    if (num > 0) & (kind == PASSES):
        _pass_row(
            x, B, C, D, state, x_records, B_records, row, y, sizes, tickets, h0, first, num, drafts, slot,
            committed, edge, snapshot, snapshot_edge, ring_len, x_len, B_len, C_len, state_again, x_again,
            H, P, G, N, CHUNK, BP, HB, PASS_STAGES,
        )  # fmt: skip
    elif (num > 0) & (kind == STAYS):
        blocks: tl.constexpr = (P + BP - 1) // BP
        g, end, base = h0 // (H // G), committed + num, slot.to(tl.int64) * ring_len
        p, n, c = tl.arange(0, BP), tl.arange(0, N), tl.arange(0, CHUNK)
        held, token = (edge > 0) & (committed > 0), (first + edge - committed).to(tl.int64)
        xr, Br = x_records + base * (H * P), B_records + base * (G * N) + g * N
        old, new = ages(edge + c, committed, end)
        place, q = (edge + c) % ring_len, committed - edge + tl.arange(0, 16)
        live = (q < CHUNK) & (edge + q < end)
        C_q = _asked(C + g * N + token * C_len, q, n, live, C_len)
        B_c = take(Br, B + g * N + token * B_len, place, n, old, new, n < N, G * N, B_len)
        if h0 % (H // G) == 0:
            tl.store(Br + (place[:, None] * (G * N) + n[None, :]), B_c, mask=new[:, None])
        scores = dot(B_c, tl.trans(C_q))
        # Scalar bases, and offsets that no iteration changes: address tiles would fill the registers.
        inner, to = p[:, None] * N + n[None, :], q[None, :] * (H * P) + p[:, None]
        x_place, slot_state = place[:, None] * (H * P) + p[None, :], slot.to(tl.int64) * (H * P * N)
        own_sizes = sizes + row.to(tl.int64) * (H * 4 * CHUNK)
        for i in tl.range(HB * blocks, num_stages=STAGES):
            h, p0 = h0 + i // blocks, i % blocks * BP
            at, stored, of_head = h * P + p0, p < P - p0, own_sizes + h * (4 * CHUNK)
            s = tl.load(state + (slot_state + at * N) + inner, mask=stored[:, None] & held, other=0.0)
            x_c = take(xr + at, x + token * x_len + at, place, p, old, new, stored, H * P, x_len)
            dt_c, total = tl.load(of_head + c), tl.load(of_head + CHUNK + c)
            total_q = tl.load(of_head + CHUNK + q, mask=live, other=0.0)
            out = _outputs(s, x_c, scores, C_q, dt_c, total, total_q, q, tl.load(D + h))
            tl.store(y + (token * (H * P) + at) + to, out.to(y.dtype.element_ty),
                     mask=live[None, :] & stored[:, None])  # fmt: skip
            tl.store(x_again + (base * (H * P) + at) + x_place, x_c, mask=new[:, None] & stored[None, :])
            if committed == 0:
                tl.store(state_again + (slot_state + at * N) + inner, tl.zeros((BP, N), tl.float32),
                         mask=stored[:, None])  # fmt: skip


@triton.jit
def _pass_row(
    x, B, C, D, state, x_records, B_records, row, y, sizes, tickets, h0, first, num, drafts, slot,
    committed, edge, snapshot, snapshot_edge, ring_len, x_len, B_len, C_len, state_again, x_again,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """HB heads' outputs before and behind the first edge, and their states at the edges passed."""
    blocks: tl.constexpr = (P + BP - 1) // BP
    g, end, base = h0 // (H // G), committed + num, slot.to(tl.int64) * ring_len
    edge_2, new_edge = edge + CHUNK, (end - drafts) // CHUNK * CHUNK
    low, token = tl.maximum(committed, new_edge), (first + edge - committed).to(tl.int64)
    p, n, c = tl.arange(0, BP), tl.arange(0, N), tl.arange(0, CHUNK)
    held, token_2 = (edge > 0) & (committed > 0), token + CHUNK
    xr, Br = x_records + base * (H * P), B_records + base * (G * N) + g * N
    old, new = ages(edge + c, committed, end)
    old_2, new_2 = ages(edge_2 + c, committed, end)
    place, place_2 = (edge + c) % ring_len, (edge_2 + c) % ring_len
    q, q_2 = committed - edge + tl.arange(0, 16), tl.maximum(committed - edge_2, 0) + tl.arange(0, 16)
    live, live_2 = (q < CHUNK) & (edge + q < end), (q_2 < CHUNK) & (edge_2 + q_2 < end)
    C_q = _asked(C + g * N + token * C_len, q, n, live, C_len)
    C_2 = _asked(C + g * N + token_2 * C_len, q_2, n, live_2, C_len)
    B_c = take(Br, B + g * N + token * B_len, place, n, old, new, n < N, G * N, B_len)
    B_2 = take(Br, B + g * N + token_2 * B_len, place_2, n, old_2, new_2, n < N, G * N, B_len)
    scores, scores_2 = dot(B_c, tl.trans(C_q)), dot(B_2, tl.trans(C_2))
    inner, to = p[:, None] * N + n[None, :], q[None, :] * (H * P) + p[:, None]
    to_2, slot_state = q_2[None, :] * (H * P) + p[:, None], slot.to(tl.int64) * (H * P * N)
    x_place, kept = place[:, None] * (H * P) + p[None, :], new & (edge + c >= low)
    x_place_2, kept_2 = place_2[:, None] * (H * P) + p[None, :], new_2 & (edge_2 + c >= low)
    own_sizes = sizes + row.to(tl.int64) * (H * 4 * CHUNK)
    for i in tl.range(HB * blocks, num_stages=STAGES):
        h, p0 = h0 + i // blocks, i % blocks * BP
        at, stored, of_head = h * P + p0, p < P - p0, own_sizes + h * (4 * CHUNK)
        s = tl.load(state + (slot_state + at * N) + inner, mask=stored[:, None] & held, other=0.0)
        x_c = take(xr + at, x + token * x_len + at, place, p, old, new, stored, H * P, x_len)
        x_2 = take(xr + at, x + token_2 * x_len + at, place_2, p, old_2, new_2, stored, H * P, x_len)
        dt_c, total = tl.load(of_head + c), tl.load(of_head + CHUNK + c)
        dt_2, total_2 = tl.load(of_head + 2 * CHUNK + c), tl.load(of_head + 3 * CHUNK + c)
        total_q = tl.load(of_head + CHUNK + q, mask=live, other=0.0)
        total_q2 = tl.load(of_head + 3 * CHUNK + q_2, mask=live_2, other=0.0)
        skip, last = tl.load(D + h), tl.load(of_head + 2 * CHUNK - 1)
        ring, mine = x_again + (base * (H * P) + at), y + at
        out = _outputs(s, x_c, scores, C_q, dt_c, total, total_q, q, skip)
        tl.store(
            mine + token * (H * P) + to, out.to(y.dtype.element_ty), mask=live[None, :] & stored[:, None]
        )
        tl.store(ring + x_place, x_c, mask=kept[:, None] & stored[None, :])
        tl.store(ring + x_place_2, x_2, mask=kept_2[:, None] & stored[None, :])
        own = state_again + (slot_state + at * N)
        other = state_again + (snapshot.to(tl.int64) * (H * P * N) + at * N)
        s_1 = _fold(s, x_c, B_c, dt_c, total, last)
        _save(own, other, inner, s_1, stored[:, None], edge_2, new_edge, snapshot, snapshot_edge)
        if (new_edge == 0) & (committed == 0):
            tl.store(own + inner, tl.zeros((BP, N), tl.float32), mask=stored[:, None])
        # Not in a branch, though often needless: wgmma inside one gave a loop's later tiles wrong numbers.
        out = _outputs(s_1, x_2, scores_2, C_2, dt_2, total_2, total_q2, q_2, skip)
        tl.store(mine + token_2 * (H * P) + to_2, out.to(y.dtype.element_ty),
                 mask=live_2[None, :] & stored[:, None])  # fmt: skip
    all_groups, keeps = whose(tickets + slot, edge, low, end, h0 % (H // G) == 0, H // HB, ring_len)
    if keeps:
        for i in range(tl.where(all_groups, 0, g), tl.where(all_groups, G, g + 1)):
            _keep(B + i * N, B_records + i * N, 0, first - committed + low, low, end, slot, B_len, ring_len,
                  G * N, N, N)  # fmt: skip


@triton.jit
def _asked(C, q, n, live, C_len):
    """What the places q ask of the state."""
    return tl.load(C + (q[:, None] * C_len + n[None, :]), mask=live[:, None], other=0.0)


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
        out = _outputs(s, x_c, dot(B_c, tl.trans(C_c)), C_c, dt_c, total, total, c, skip)
        to = y + (token * (H * P) + at) + (c[None, :] * (H * P) + p[:, None])
        tl.store(to, out.to(y.dtype.element_ty), mask=new[None, :] & stored)
        s = _fold(s, x_c, B_c, dt_c, total, tl.sum(tl.where(c == CHUNK - 1, total, 0.0), 0))
        _save(own, other, inner, s, stored, start + CHUNK, new_edge, snapshot, snapshot_edge)
    low = tl.maximum(committed, new_edge)
    source = first - committed + low
    tl.debug_barrier()
    _keep(x + h * P, x_records + h * P, p0, source, low, end, slot, x_len, ring_len, H * P, P, BP)
    all_heads, mine = whose(tickets + slot, edge, low, end, p0 == 0, H * ((P + BP - 1) // BP), ring_len)
    if mine:
        for i in range(tl.where(all_heads, 0, h), tl.where(all_heads, H, h + 1)):
            _keep_dt(dt + i, dt_records + i, tl.load(dt_bias + i), dt_min, dt_max, source, low, end, slot,
                     dt_len, ring_len, H)  # fmt: skip
            if i % (H // G) == 0:
                g = i // (H // G)
                _keep(B + g * N, B_records + g * N, 0, source, low, end, slot, B_len, ring_len, G * N, N, N)


@triton.jit
def _outputs(s, x_c, scores, C_q, dt_c, total, total_q, q, skip):
    """[BP, 16] of the places q from the edge's state and the chunk's tokens up to each."""
    c = tl.arange(0, dt_c.shape[0])
    decay = tl.exp(total_q[None, :] - total[:, None]) * dt_c[:, None]
    weight = tl.where(c[:, None] <= q[None, :], scores * decay, 0.0)
    weight = tl.where(c[:, None] == q[None, :], weight + skip, weight)
    across = dot_wide_left(s, tl.trans(C_q)) * tl.exp(total_q)[None, :]
    return across + dot_wide_right(tl.trans(x_c), weight)


@triton.jit
def _fold(s, x_c, B_c, dt_c, total, last):
    """The state at the chunk's end, up to which decays sum up to `last`."""
    gain = tl.exp(last - total) * dt_c
    return s * tl.exp(last) + dot_wide_left(tl.trans(x_c).to(tl.float32) * gain[None, :], B_c)


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
