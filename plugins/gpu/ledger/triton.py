"""What a step of fixed sizes does with ids and lengths on a GPU; runtime/engine says why."""

import triton
import triton.language as tl

COMMITTED, EDGE, DRAFTS = (tl.constexpr(n) for n in (1, 2, 3))  # of lengths [4, S], behind total_len
ROW, ROW_SLOT, ROW_COMMITTED, ROW_EDGE = (tl.constexpr(n) for n in (8, 3, 4, 5))  # plugins/rows.py


@triton.jit(do_not_specialize=["num"])
def _change(changes, table, num, BLOCK: tl.constexpr):
    # Grid: blocks of changes.
    # Tile: BLOCK changes.
    # Traffic: places and pages once.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(changes + 2 * at, mask=at < num, other=0)
    page = tl.load(changes + 2 * at + 1, mask=at < num, other=0)
    tl.store(table + place, page.to(tl.int32), mask=at < num)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_slots", "table_len", "ids_len"])
def _fill(rows, slots, token_row, token_offset, table, lengths, ids, page_table, token_ids, positions,
          num_rows, num_tokens, num_slots, table_len, ids_len, BLOCK: tl.constexpr):  # fmt: skip
    # Grid: rows, then blocks of tokens.
    # Tile: BLOCK pages or tokens.
    # Traffic: a row's line of the table, a token's id, once.
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if program < num_rows:
        slot = tl.load(slots + program)
        committed = tl.load(lengths + COMMITTED * num_slots + slot)
        tl.store(rows + ROW * program + ROW_COMMITTED, committed.to(tl.int32))
        edge = tl.load(lengths + EDGE * num_slots + slot)
        tl.store(rows + ROW * program + ROW_EDGE, edge.to(tl.int32))
        for first in range(0, table_len, BLOCK):
            at = first + lane
            page = tl.load(table + slot * table_len + at, mask=at < table_len)
            tl.store(page_table + program.to(tl.int64) * table_len + at, page, mask=at < table_len)
    else:
        token = (program - num_rows) * BLOCK + lane
        live = token < num_tokens
        owner = tl.load(slots + tl.load(token_row + token, mask=live, other=0), mask=live, other=0)
        offset = tl.load(token_offset + token, mask=live, other=0)
        position = tl.load(lengths + COMMITTED * num_slots + owner, mask=live, other=0) + offset
        tl.store(positions + token, position.to(tl.int32), mask=live)
        tl.store(token_ids + token, tl.load(ids + owner * ids_len + position, mask=live, other=0), mask=live)


@triton.jit(do_not_specialize=["num_slots", "ids_len", "chunk_len", "width", "told_len"])
def _accept(rows, slots, num_drafts, chosen, logits, lengths, ids, told, num_slots, ids_len, chunk_len, width,
            told_len, BLOCK: tl.constexpr):  # fmt: skip
    # Grid: rows; each has a line per token.
    # Tile: BLOCK lines, at least `width`.
    # Traffic: a row's choices and drafts once.
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    answer = told + row.to(tl.int64) * told_len
    first, num_lines = tl.load(rows + ROW * row), tl.load(rows + ROW * row + 1)
    live = (lane < num_lines) & (slot > 0)
    token = tl.load(chosen + first + lane, mask=live, other=0)
    logit = tl.load(logits + first + lane, mask=live, other=0.0)
    finite = tl.abs(logit) < float("inf")  # NaN is not below
    total = tl.load(lengths + slot)
    judged = tl.minimum(tl.load(num_drafts + row), tl.load(lengths + DRAFTS * num_slots + slot))
    text = ids + slot * ids_len + total
    draft = tl.load(text + lane, mask=live, other=-1).to(tl.int64)
    agrees = (token == draft) & (lane < judged) & finite
    accepted = tl.min(tl.where(agrees, BLOCK, lane), axis=0)
    last = tl.sum(tl.where(lane == accepted, token, 0), axis=0)
    broken = tl.sum(tl.where((lane == accepted) & (finite == 0), 1, 0), axis=0)
    tl.store(answer + lane, token, mask=lane < width)
    tl.store(answer + width, accepted.to(tl.int64))
    tl.store(answer + width + 1, judged)
    tl.store(answer + width + 2, broken.to(tl.int64))
    if slot > 0:
        final = tl.load(lengths + COMMITTED * num_slots + slot) + 1
        tl.store(text + accepted, last.to(tl.int32))
        tl.store(lengths + slot, total + accepted + 1)
        tl.store(lengths + COMMITTED * num_slots + slot, total + accepted)
        tl.store(lengths + EDGE * num_slots + slot, final - final % chunk_len)
        tl.store(lengths + DRAFTS * num_slots + slot, 0)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "ids_len", "width", "told_len", "most"])
def _tell(slots, lengths, ids, told, num_rows, num_slots, ids_len, width, told_len, most, BLOCK: tl.constexpr,
          IDS: tl.constexpr):  # fmt: skip
    # Grid: rows, then blocks of the dump slot's ids.
    # Tile: BLOCK drafts, at least `most`; IDS ids.
    # Traffic: a row's number of drafts, and the drafts; zeros over all that the dump slot has.
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if row < num_rows:
        slot = tl.load(slots + row)
        answer = told + row.to(tl.int64) * told_len + width
        tl.store(answer + 3, tl.load(lengths + DRAFTS * num_slots + slot))
        draft = tl.load(ids + slot * ids_len + tl.load(lengths + slot) + lane, mask=lane < most, other=0)
        tl.store(answer + 4 + lane, draft.to(tl.int64), mask=lane < most)
    else:
        at = (row - num_rows) * IDS + tl.arange(0, IDS)
        tl.store(ids + at, tl.zeros((IDS,), tl.int32), mask=at < ids_len)
        if row == num_rows:
            each = tl.arange(0, 4)
            tl.store(lengths + each * num_slots, tl.zeros((4,), tl.int64))
