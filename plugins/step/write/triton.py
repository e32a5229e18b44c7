"""A draft of each row."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import DRAFT, ROOM, SLOT, TOTAL, field, length


@triton.jit(do_not_specialize=["num_rows", "num_slots", "ids_len", "number"])
def _write(plan, chosen, lengths, ids, num_rows, num_slots, ids_len, number, ROWS: tl.constexpr):
    # Grid: blocks of rows.
    # Tile: ROWS rows.
    # Traffic: a few numbers of each once.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = n < num_rows
    draft, slot = field(plan, n, is_row, DRAFT), field(plan, n, is_row, SLOT).to(tl.int64)
    wants = is_row & (draft < field(plan, n + 1, is_row, DRAFT)) & (field(plan, n, is_row, ROOM) > number)
    place = length(lengths, slot, num_slots, wants, TOTAL) + number
    token = tl.load(chosen + draft, mask=wants, other=0)
    tl.store(ids + slot * ids_len + place, token.to(tl.int32), mask=wants)
