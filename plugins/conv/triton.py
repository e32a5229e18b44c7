"""The causal depthwise convolution with silu on CUDA, over the ring of raw columns and new tokens alike."""

import triton
import triton.language as tl

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
    real = tl.full((BE,), True, tl.int1) if E % BE == 0 else e < E
    taps, base = _taps(weight, e, real, W), tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    token, stop = begin, tl.minimum(begin + BT, num_tokens)
    while token < stop:
        window, line = (), x + token.to(tl.int64) * x_len + e
        for i in tl.static_range(1 - W, BT):  # asked for before it is known whose they are
            there = real & (token + i < num_tokens)
            there = there & (token + i >= 0) if i < 0 else there
            window += (tl.load(line + i * x_len, mask=there, other=0.0),)
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
        to = y + token.to(tl.int64) * E + e
        if live:
            window = _with_held(window, ring, position, committed, real, E, W, RING)
            _filter(window, taps, base, to, token, end, real, E, W, BT)
            low = tl.maximum(committed, new_edge - W + 1)
            if (committed + end - first > low) & (not is_long):
                for i in tl.static_range(BT):
                    new = real & (token + i < end) & (position + i >= low)
                    tl.store(ring + _place(position + i, RING) * E, window[i + W - 1], mask=new)
            done = tl.where(is_long, (token < lead) & (end >= lead), token == first)
            if snaps & done:
                _snapshot(x, columns, ring, snapshot, snapshot_edge, committed, first, x_len, e, E, W, RING)
            if is_long & done:
                tl.debug_barrier()
                low = tl.maximum(low, committed + num - RING)
                _keep(x, ring, low, committed, first, last, x_len, e, E, RING)
        else:
            for i in tl.static_range(BT):
                zeros = tl.zeros((BE,), y.dtype.element_ty)
                tl.store(to + i * E, zeros, mask=real & (token + i < end))
        token = tl.where(others, lead, end)


@triton.jit
def _place(position, RING: tl.constexpr):
    """Where the ring holds the column of a position."""
    return position.to(tl.uint32) % RING


@triton.jit
def _with_held(window, ring, position, committed, real, E: tl.constexpr, W: tl.constexpr, RING: tl.constexpr):
    """The window, with the ring's columns and zeros for what lies before the row's tokens."""
    before = ()
    for i in tl.static_range(W - 1):
        p = position + i - (W - 1)
        held = tl.load(ring + _place(p, RING) * E, mask=real & (p >= 0) & (p < committed), other=0.0)
        before += (tl.where(p < committed, held, window[i]),)
    return before + window[W - 1 :]


@triton.jit
def _filter(
    window, taps, base, to, token, end, real, E: tl.constexpr, W: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Stores the silu of every token's sum."""
    for i in tl.static_range(BT):
        total = base
        for tap in tl.static_range(W):
            total = tl.fma(window[i + tap].to(tl.float32), taps[tap], total)
        # total / (1 + exp(-total)) in 6 instructions instead of 15: here they are what costs
        root = tl.rsqrt(1.0 + tl.exp2(total * -1.4426950408889634))
        tl.store(to + i * E, (total * root * root).to(to.dtype.element_ty), mask=real & (token + i < end))


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
        column = tl.load(tl.where(p < committed, ring + _place(p, RING) * E, brought), mask=there, other=0.0)
        tl.store(to + _place(p, RING) * E, column, mask=there)


@triton.jit
def _keep(x, ring, low, committed, first, last, x_len, e, E: tl.constexpr, RING: tl.constexpr):
    """The row's columns from position `low` on, 8 at a time."""
    for start in range(first + low - committed, last, 8):
        t = start + tl.arange(0, 8)
        mask = (t < last)[:, None] & (e < E)[None, :]
        raw = tl.load(x + t.to(tl.int64)[:, None] * x_len + e[None, :], mask=mask)
        at = _place(committed + t - first, RING) * E
        tl.store(ring[None, :] + at[:, None], raw, mask=mask)
