"""The causal depthwise convolution with silu on CUDA, over the ring of raw columns and new tokens alike."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.rows import load_row


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _conv(
    x, weight, bias, columns, rows, y, num_rows, num_tokens, ring_len, x_len, E: tl.constexpr,
    W: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    # Grid: one program per 16 tokens, whatever rows they belong to, and BE channels.
    # Tile: [16, BE] of one tap after the other.
    # Traffic: x once (its taps again from cache), the W - 1 columns before a row, y; new columns to the ring.
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row = tl.full((BT,), -1, tl.int32)
    for base in range(0, num_rows, ROWS):
        n = base + tl.arange(0, ROWS)
        at, here = rows + n * 8, n < num_rows
        first, num = tl.load(at, mask=here, other=0), tl.load(at + 1, mask=here, other=0)
        age, slot = token[:, None] - first[None, :], tl.load(at + 3, mask=here, other=0)
        mine = (age >= 0) & (age < num[None, :]) & (slot != 0)[None, :]
        row = tl.maximum(row, tl.max(tl.where(mine, n[None, :], -1), 1))
    live, at = (row >= 0) & (token < num_tokens), rows + row * 8
    first, num = tl.load(at, mask=live, other=0), tl.load(at + 1, mask=live, other=0)
    drafts, slot = tl.load(at + 2, mask=live, other=0), tl.load(at + 3, mask=live, other=0)
    committed = tl.load(at + 4, mask=live, other=0)
    position, real = committed + token - first, (e < E)[None, :]
    ring = columns + (slot.to(tl.int64) * ring_len * E)[:, None] + e[None, :]
    new = x + token.to(tl.int64)[:, None] * x_len + e[None, :]
    total = tl.zeros((BT, BE), tl.float32) + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        back = W - 1 - tap
        old = (token - back < first)[:, None]
        column = tl.where(old, ring + ((position - back) % ring_len)[:, None] * E, new - back * x_len)
        there = (live & (position >= back))[:, None] & real
        factor = tl.load(weight + e * W + tap, mask=e < E, other=0.0).to(tl.float32)
        total += tl.load(column, mask=there, other=0.0).to(tl.float32) * factor[None, :]
    out = tl.where(live[:, None], total / (1.0 + tl.exp(-total)), 0.0)
    tl.store(
        y + token.to(tl.int64)[:, None] * E + e[None, :],
        out.to(y.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & real,
    )
    kept = (
        live & (num + W - 1 <= ring_len) & (position >= (committed + num - drafts) // CHUNK * CHUNK - W + 1)
    )
    place = (position % ring_len)[:, None] * E
    if LATE:  # a column that goes here may take the place of one that the row's snapshot is still to get
        edge, snapshot = tl.load(at + 5, mask=live, other=0), tl.load(at + 6, mask=live, other=0)
        snapshot_edge, old = tl.load(at + 7, mask=live, other=0), position - ring_len
        final = committed + num - drafts
        lost = kept & (snapshot != 0) & (edge < snapshot_edge) & (snapshot_edge <= final // CHUNK * CHUNK)
        lost &= (old >= 0) & (old >= snapshot_edge - W + 1) & (old < snapshot_edge)
        column = tl.load(ring + place, mask=lost[:, None] & real, other=0.0)
        other = columns + (snapshot.to(tl.int64) * ring_len * E)[:, None] + e[None, :]
        tl.store(other + place, column, mask=lost[:, None] & real)
        tl.debug_barrier()
    raw = tl.load(new, mask=kept[:, None] & real, other=0.0)
    tl.store(ring + place, raw, mask=kept[:, None] & real)
    for i in range(BT):
        starts = live & (token == first) & (token == tl.program_id(0) * BT + i) & (num + W - 1 <= ring_len)
        one = tl.max(tl.where(starts, row, -1), 0)
        if one >= 0:
            _snapshot(x, columns, rows, one, ring_len, x_len, e, E, W, CHUNK, LATE)


@triton.jit
def _snapshot(
    x, columns, rows, row, ring_len, x_len, e, E: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """The W - 1 columns before the snapshot's edge to its slot, if the row passes that edge.

    LATE: but those whose place a new column takes: who puts it there has kept them.
    """
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    new_edge = (committed + num - drafts) // CHUNK * CHUNK
    if (snapshot != 0) & (edge < snapshot_edge) & (snapshot_edge <= new_edge):
        for back in tl.static_range(1, W):
            position = snapshot_edge - back
            place = position % ring_len
            held = columns + (slot.to(tl.int64) * ring_len + place) * E + e
            brought = x + (first + position - committed).to(tl.int64) * x_len + e
            mask, later = (e < E) & (position >= 0), position + ring_len
            if LATE:
                mask &= (later >= committed + num) | (later < new_edge - W + 1)
            column = tl.load(tl.where(position < committed, held, brought), mask=mask, other=0.0)
            to = columns + (snapshot.to(tl.int64) * ring_len + place) * E + e
            tl.store(to, column, mask=mask)


@triton.jit
def _keep_long(
    x, columns, rows, ring_len, x_len, E: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr
):
    # Grid: one program per row and BE channels; a row whose new columns overwrite none still read is done.
    # Tile: [16, BE] columns.
    # Traffic: at most a ring of columns from x.
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    first, num, drafts, slot, committed, _, _, _ = load_row(rows, tl.program_id(0))
    if num + W - 1 > ring_len:
        _snapshot(x, columns, rows, tl.program_id(0), ring_len, x_len, e, E, W, CHUNK, False)
        tl.debug_barrier()
        end = committed + num
        low = tl.maximum(tl.maximum(committed, (end - drafts) // CHUNK * CHUNK - W + 1), end - ring_len)
        for start in range(low, end, 16):
            position = start + tl.arange(0, 16)
            mask = (position < end)[:, None] & (e < E)[None, :]
            token = (first + position - committed).to(tl.int64)
            raw = tl.load(x + token[:, None] * x_len + e[None, :], mask=mask)
            at = (slot.to(tl.int64) * ring_len + position % ring_len)[:, None] * E
            tl.store(columns + at + e[None, :], raw, mask=mask)
