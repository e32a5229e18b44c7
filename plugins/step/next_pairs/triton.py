"""What a drafting head reads to bring one more draft."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import DRAFT, ROOM, SLOT, TOTAL, WIDTH, field, length, write_head_rows


@triton.jit(do_not_specialize=["num_rows", "num_drafting", "num_slots", "ids_len", "number"])
def _next_pairs(plan, lengths, ids, head_rows, token_ids, positions, num_rows, num_drafting, num_slots,
                ids_len, number, ROWS: tl.constexpr):  # fmt: skip
    # Grid: blocks of rows.
    # Tile: ROWS rows.
    # Traffic: a few numbers of each once.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = n < num_rows
    draft, slot = field(plan, n, is_row, DRAFT), field(plan, n, is_row, SLOT).to(tl.int64)
    num = field(plan, n + 1, is_row, DRAFT) - draft
    goes_on = (num > 0) & (field(plan, n, is_row, ROOM) > number)
    place = length(lengths, slot, num_slots, goes_on, TOTAL) + number - 1
    token = tl.load(ids + slot * ids_len + place, mask=goes_on, other=0)
    place = tl.where(goes_on, place, 0).to(tl.int32)
    head_slot = tl.where(goes_on, slot, 0).to(tl.int32)
    write_head_rows(head_rows, n, draft, num, head_slot, place, is_row)
    tl.store(token_ids + draft, token, mask=num > 0)
    tl.store(positions + draft, place, mask=num > 0)
    nobody = (n >= tl.load(plan + num_rows * WIDTH + DRAFT)) & (n < num_drafting)
    tl.store(token_ids + n, tl.zeros((ROWS,), tl.int32), mask=nobody)
    tl.store(positions + n, tl.zeros((ROWS,), tl.int32), mask=nobody)
