"""What a drafting head reads first."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import (
    COMMITTED,
    DRAFT,
    DRAFTS,
    OWED,
    PAIR,
    ROOM,
    SLOT,
    START,
    TOKEN,
    WIDTH,
    field,
    length,
    owners_of,
    write_head_rows,
)


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "num_drafting", "num_slots", "ids_len", "ring_len"])
def _first_pairs(plan, rows, hidden, ring, lengths, ids, head_rows, token_ids, before, positions, wanted,
                 draft_slot, num_rows, num_pairs, num_drafting, num_slots, ids_len, ring_len, width,
                 PAIRS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    # Grid: blocks of pairs, then of rows, x blocks of channels.
    # Tile: CHANNELS channels of PAIRS states, or a few numbers of ROWS rows.
    # Traffic: a state of each pair read and written; a column of the plan in each block of pairs.
    block, blocks_of_pairs = tl.program_id(0), tl.cdiv(num_pairs, PAIRS)
    if block < blocks_of_pairs:
        pair = block * PAIRS + tl.arange(0, PAIRS)
        row = owners_of(plan, pair, num_rows, PAIR)
        inside, live = pair < num_pairs, row < num_rows
        slot = field(plan, row, live, SLOT).to(tl.int64)
        start = tl.load(rows + row * 8 + START, mask=live, other=0)
        offset = pair - field(plan, row, live, PAIR) - field(plan, row, live, OWED)  # behind the first token
        place = tl.where(live, start + 1 + offset, 0)
        if tl.program_id(1) == 0:
            token_id = tl.load(ids + slot * ids_len + place, mask=inside & live, other=0)
            tl.store(token_ids + pair, token_id, mask=inside)
            tl.store(positions + pair, place, mask=inside)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        there = (inside[:, None]) & (channel < width)[None, :]
        is_old, is_new = live & (offset < 0), live & (offset >= 0)
        old = (slot * ring_len + tl.maximum(place - 1, 0) % ring_len) * width
        new = (field(plan, row, live, TOKEN) + offset).to(tl.int64) * width
        from_ring = tl.load(ring + old[:, None] + channel[None, :], mask=there & is_old[:, None], other=0.0)
        from_step = tl.load(hidden + new[:, None] + channel[None, :], mask=there & is_new[:, None], other=0.0)
        state = tl.where(is_old[:, None], from_ring, from_step)
        tl.store(before + (pair.to(tl.int64) * width)[:, None] + channel[None, :], state, mask=there)
    elif tl.program_id(1) == 0:
        n = (block - blocks_of_pairs) * ROWS + tl.arange(0, ROWS)
        is_row = n < num_rows
        _first_rows(plan, rows, lengths, head_rows, wanted, draft_slot, n, is_row, num_slots)
        nobody = (n >= tl.load(plan + num_rows * WIDTH + DRAFT)) & (n < num_drafting)
        tl.store(wanted + n, tl.zeros((ROWS,), tl.int32), mask=nobody)
        tl.store(draft_slot + n, tl.zeros((ROWS,), tl.int64), mask=nobody)


@triton.jit
def _first_rows(plan, rows, lengths, head_rows, wanted, draft_slot, n, is_row, num_slots):
    first, owed = field(plan, n, is_row, PAIR), field(plan, n, is_row, OWED)
    num = field(plan, n + 1, is_row, PAIR) - first
    slot, start = field(plan, n, is_row, SLOT), tl.load(rows + n * 8 + START, mask=is_row, other=0)
    head_slot, head_start = tl.where(num > 0, slot, 0), tl.where(num > 0, start + 1 - owed, 0)
    write_head_rows(head_rows, n, first, num, head_slot, head_start, is_row)
    draft, slot = field(plan, n, is_row, DRAFT), slot.to(tl.int64)
    drafts = is_row & (draft < field(plan, n + 1, is_row, DRAFT))
    num_new = length(lengths, slot, num_slots, drafts, COMMITTED).to(tl.int32) - start
    tl.store(wanted + draft, first + owed + num_new - 1, mask=drafts)
    tl.store(draft_slot + draft, slot, mask=drafts)
    room = field(plan, n, is_row, ROOM).to(tl.int64)
    tl.store(lengths + DRAFTS * num_slots + slot, room, mask=drafts)
