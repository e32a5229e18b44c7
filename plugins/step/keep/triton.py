"""What a drafting head will read later."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import EDGE


@triton.jit(do_not_specialize=["num_slots", "ring_len"])
def _keep(rows, lengths, hidden, ring, num_slots, ring_len, width, TOKENS: tl.constexpr,
          CHANNELS: tl.constexpr):  # fmt: skip
    # Grid: rows x blocks of channels.
    # Tile: CHANNELS channels of TOKENS states.
    # Traffic: a state of each of a row's last ring_len tokens read and written, and one of its snapshot.
    row = rows + tl.program_id(0) * 8  # plugins/rows.py
    first, num_tokens = tl.load(row).to(tl.int64), tl.load(row + 1)
    slot, committed, edge = tl.load(row + 3).to(tl.int64), tl.load(row + 4), tl.load(row + 5)
    snapshot_slot, last = tl.load(row + 6).to(tl.int64), tl.load(row + 7) - 1
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < width
    own = ring + slot * ring_len * width + channel
    if slot > 0:
        new_edge = tl.load(lengths + EDGE * num_slots + slot)
        if (snapshot_slot > 0) & (edge <= last) & (last < new_edge):
            place = last % ring_len
            old = tl.load(own + place.to(tl.int64) * width, mask=there & (last < committed), other=0.0)
            new = hidden + (first + last - committed) * width + channel
            new = tl.load(new, mask=there & (last >= committed), other=0.0)
            state = tl.where(last < committed, old, new)
            tl.store(ring + (snapshot_slot * ring_len + place) * width + channel, state, mask=there)
            tl.debug_barrier()  # where the next stores, this has read
        for base in range(tl.maximum(num_tokens - ring_len, 0), num_tokens, TOKENS):
            token = base + tl.arange(0, TOKENS)
            copied = (token < num_tokens)[:, None] & there[None, :]
            state = tl.load(hidden + ((first + token) * width)[:, None] + channel[None, :], mask=copied)
            place = ((committed + token) % ring_len).to(tl.int64)
            tl.store(own[None, :] + (place * width)[:, None], state, mask=copied)
