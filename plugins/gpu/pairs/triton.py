"""What an MTP head reads, keeps and writes in a step of fixed sizes on a GPU; runtime/engine says why."""

import triton
import triton.language as tl

COMMITTED, EDGE, DRAFTS = (tl.constexpr(n) for n in (1, 2, 3))  # of lengths [4, S], behind total_len
ROW, ROW_SLOT, ROW_COMMITTED, ROW_EDGE, KEPT_IN, KEPT_AT = (tl.constexpr(n) for n in (8, 3, 4, 5, 6, 7))


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "ring_len"])
def _before(pair_row, pair_offset, rows, lengths, hidden, ring, before, num_pairs, num_slots, ring_len, width,
            BLOCK: tl.constexpr):  # fmt: skip
    # Grid: pairs, then rows, x blocks of channels.
    # Tile: BLOCK channels of a state.
    # Traffic: a state of each pair read and written, and one of each row whose snapshot was taken.
    program = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    is_pair = program < num_pairs
    row = tl.load(pair_row + program, mask=is_pair, other=0)
    offset = tl.load(pair_offset + program, mask=is_pair, other=0)
    known = rows + ROW * tl.where(is_pair, row, (program - num_pairs).to(tl.int64))
    first, committed = tl.load(known).to(tl.int64), tl.load(known + ROW_COMMITTED).to(tl.int64)
    slot, edge = tl.load(known + ROW_SLOT).to(tl.int64), tl.load(known + ROW_EDGE)
    last = tl.load(known + KEPT_AT).to(tl.int64) - 1
    place = tl.where(is_pair, committed + offset - 1, last)
    is_new = (offset >= 1) if is_pair else (last >= committed)
    old = ring + (slot * ring_len + tl.maximum(place, 0) % ring_len) * width
    new = hidden + tl.maximum(first + place - committed, 0) * width
    passed = (edge <= last) & (last < tl.load(lengths + EDGE * num_slots + slot))
    wanted = inside & (is_pair | passed)
    state = tl.where(
        is_new, tl.load(new + at, mask=wanted & is_new), tl.load(old + at, mask=wanted & ~is_new)
    )
    if is_pair:
        tl.store(before + program.to(tl.int64) * width + at, state, mask=inside)
    else:
        kept_in = tl.load(known + KEPT_IN).to(tl.int64)
        tl.store(
            ring + (kept_in * ring_len + tl.maximum(last, 0) % ring_len) * width + at, state, mask=wanted
        )


@triton.jit(do_not_specialize=["ring_len"])
def _keep(token_slot, positions, hidden, ring, ring_len, width, BLOCK: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of a state.
    # Traffic: a state of each token read and written.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, place = tl.load(token_slot + token), tl.load(positions + token) % ring_len
    state = tl.load(hidden + token * width + at, mask=at < width)
    tl.store(ring + (slot * ring_len + place) * width + at, state, mask=(at < width) & (slot > 0))


@triton.jit(do_not_specialize=["num_rows", "num_pairs", "num_slots", "ids_len"])
def _first_pairs(rows, slots, room, last, head_rows, pair_row, pair_offset, pair_slot, lengths, ids, wanted,
                 token_ids, positions, num_rows, num_pairs, num_slots, ids_len,
                 BLOCK: tl.constexpr):  # fmt: skip
    # Grid: blocks of rows or pairs.
    # Tile: BLOCK rows, and BLOCK pairs.
    # Traffic: a few numbers of each once.
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_pair = n < num_rows, n < num_pairs
    slot = tl.load(slots + n, mask=is_row, other=0)
    num_new = tl.load(lengths + COMMITTED * num_slots + slot, mask=is_row, other=0)
    num_new -= tl.load(rows + ROW * n + ROW_COMMITTED, mask=is_row, other=0)
    line = tl.load(last + n, mask=is_row, other=0) + num_new - 1
    tl.store(wanted + n, tl.maximum(line, 0).to(tl.int32), mask=is_row)
    pair = tl.load(head_rows + ROW * n, mask=is_row, other=0)
    start = tl.load(rows + ROW * tl.load(pair_row + pair, mask=is_row, other=0) + ROW_COMMITTED, mask=is_row)
    start += tl.load(pair_offset + pair, mask=is_row, other=0)
    tl.store(head_rows + ROW * n + ROW_COMMITTED, start.to(tl.int32), mask=is_row)
    drafts = tl.load(room + n, mask=is_row, other=0)
    tl.store(lengths + DRAFTS * num_slots + slot, drafts, mask=is_row & (slot > 0))
    place = tl.load(rows + ROW * tl.load(pair_row + n, mask=is_pair, other=0) + ROW_COMMITTED, mask=is_pair)
    place += tl.load(pair_offset + n, mask=is_pair, other=0)
    tl.store(positions + n, place.to(tl.int32), mask=is_pair)
    own = tl.load(pair_slot + n, mask=is_pair, other=0)
    tl.store(token_ids + n, tl.load(ids + own * ids_len + place, mask=is_pair, other=0), mask=is_pair)


@triton.jit(do_not_specialize=["at", "num_rows", "ids_len"])
def _next_pairs(chosen, slots, room, lengths, ids, rows, token_ids, positions, at, num_rows, ids_len,
                BLOCK: tl.constexpr):  # fmt: skip
    # Grid: blocks of rows.
    # Tile: BLOCK rows.
    # Traffic: a few numbers of each once.
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = n < num_rows
    slot, draft = tl.load(slots + n, mask=live, other=0), tl.load(chosen + n, mask=live, other=0)
    place = tl.load(lengths + slot, mask=live, other=0) + at
    tl.store(ids + slot * ids_len + place, draft.to(tl.int32), mask=live & (slot > 0))
    goes_on = tl.load(room + n, mask=live, other=0) > at + 1
    slot, place = tl.where(goes_on, slot, 0).to(tl.int32), tl.where(goes_on, place, 0).to(tl.int32)
    tl.store(token_ids + n, tl.where(goes_on, draft, 0).to(tl.int32), mask=live)
    tl.store(positions + n, place, mask=live)
    for column in tl.static_range(ROW):
        value = tl.zeros((BLOCK,), tl.int32)
        if column == 0:
            value = n
        elif column == 1:
            value += 1
        elif column == ROW_SLOT:
            value = slot
        elif column == ROW_COMMITTED:
            value = place
        tl.store(rows + ROW * n + column, value, mask=live)
