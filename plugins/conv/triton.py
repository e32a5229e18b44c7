"""The causal depthwise convolution with silu on CUDA, over the ring of raw columns and new tokens alike."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import silu
from hemiola.plugins.gpu.rows import load_row, owner_of


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _conv(
    x, weight, bias, columns, rows, y, num_rows, num_tokens, x_len, E: tl.constexpr, W: tl.constexpr,
    RING: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    # Grid: one warp per BE channels and BT tokens, whatever rows they belong to.
    # Tile: W columns of [BE] that slide along the tokens of one row after the other.
    # Traffic: x once and W - 1 columns more per BT, as many before a row, y; new columns to the ring.
    begin = tl.program_id(1) * BT
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    real = e < E
    taps, base = _taps(weight, e, real, W), tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    token, stop = begin, tl.minimum(begin + BT, num_tokens)
    while token < stop:
        window = ()
        for i in tl.static_range(1 - W, BT):  # asked for before it is known whose they are
            t = token + i
            line = x + t.to(tl.int64) * x_len + e
            window += (tl.load(line, mask=real & (t >= 0) & (t < num_tokens), other=0.0),)
        row, behind = owner_of(rows, token, num_rows, num_tokens)
        live = row >= 0
        first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(
            rows, tl.maximum(row, 0)
        )
        last, lead = first + num, first + tl.minimum(num, W - 1)
        new_edge = (committed + num - drafts) // CHUNK * CHUNK
        snaps = live & (snapshot != 0) & (edge < snapshot_edge) & (snapshot_edge <= new_edge)
        oldest = tl.where(snaps, tl.minimum(committed, snapshot_edge), committed) - W + 1
        # New columns of a long row overwrite such as are still read: who has its first token does it all.
        is_long = live & (committed + num - oldest > RING)
        others = is_long & (first < begin) & (token < lead)
        stop = tl.where(is_long & (first >= begin), tl.maximum(stop, lead), stop)
        end = tl.minimum(tl.minimum(stop, token + BT), tl.where(live, last, behind))
        end = tl.where(others, token, end)
        ring, position = columns + slot.to(tl.int64) * RING * E + e, committed + token - first
        before = ()
        for i in tl.static_range(W - 1):
            p = position + i - (W - 1)
            held = live & (p < committed)
            kept = tl.load(ring + p % RING * E, mask=real & held & (p >= 0), other=0.0)
            before += (tl.where(held, kept, window[i]),)
        window = before + window[W - 1 :]
        for i in tl.static_range(BT):
            total = base
            for tap in tl.static_range(W):
                total += window[i + tap].to(tl.float32) * taps[tap]
            out = tl.where(live, silu(total), 0.0).to(y.dtype.element_ty)
            tl.store(y + (token + i).to(tl.int64) * E + e, out, mask=real & (token + i < end))
        low = tl.maximum(committed, new_edge - W + 1)
        if live & (committed + end - first > low) & (not is_long):
            for i in tl.static_range(BT):
                p = position + i
                new = real & (token + i < end) & (p >= low)
                tl.store(ring + p % RING * E, window[i + W - 1], mask=new)
        done = tl.where(is_long, (token < lead) & (end >= lead), token == first)
        if snaps & done:
            _snapshot(x, columns, ring, snapshot, snapshot_edge, committed, first, x_len, e, E, W, RING)
        if is_long & done:
            tl.debug_barrier()
            _keep(x, ring, tl.maximum(low, committed + num - RING), committed, first, last, x_len, e, E, RING)
        token = tl.where(others, lead, end)


@triton.jit
def _taps(weight, e, real, W: tl.constexpr):
    """[BE] of every tap, in fp32."""
    if W == 4:
        at = weight + e[:, None] * W + tl.arange(0, W)[None, :]
        every = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(every, (e.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        taps = ()
        for tap in tl.static_range(W):
            taps += (tl.load(weight + e * W + tap, mask=real, other=0.0).to(tl.float32),)
        return taps


@triton.jit
def _snapshot(
    x, columns, ring, snapshot, snapshot_edge, committed, first, x_len, e, E: tl.constexpr, W: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """The W - 1 columns before the snapshot's edge to its slot."""
    to = columns + snapshot.to(tl.int64) * RING * E + e
    for back in tl.static_range(1, W):
        p = snapshot_edge - back
        brought = x + (first + p - committed).to(tl.int64) * x_len + e
        there = (e < E) & (p >= 0)
        column = tl.load(tl.where(p < committed, ring + p % RING * E, brought), mask=there, other=0.0)
        tl.store(to + p % RING * E, column, mask=there)


@triton.jit
def _keep(x, ring, low, committed, first, last, x_len, e, E: tl.constexpr, RING: tl.constexpr):
    """The row's columns from position `low` on, 8 at a time."""
    for start in range(first + low - committed, last, 8):
        t = start + tl.arange(0, 8)
        mask = (t < last)[:, None] & (e < E)[None, :]
        raw = tl.load(x + t.to(tl.int64)[:, None] * x_len + e[None, :], mask=mask)
        at = (committed + t - first) % RING * E
        tl.store(ring[None, :] + at[:, None], raw, mask=mask)
