"""A step's inputs, from its plan and the ledger."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import (
    COMMITTED,
    EDGE,
    LINE,
    NUM_DRAFTS,
    SLOT,
    SNAPSHOT_EDGE,
    SNAPSHOT_SLOT,
    TOKEN,
    TOTAL,
    WIDTH,
    field,
    length,
    owners_of,
)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_lines", "num_slots", "table_len", "ids_len"])
def _fill(plan, table, lengths, ids, rows, pages, token_ids, positions, line_token, line_slot, line_position,
          num_rows, num_tokens, num_lines, num_slots, table_len, ids_len, ITEMS: tl.constexpr,
          PAGES: tl.constexpr):  # fmt: skip
    # Grid: rows, then blocks of tokens, then blocks of lines.
    # Tile: PAGES pages of a row, or ITEMS tokens or lines.
    # Traffic: a row's line of the table and a token's id once; a column of the plan in each block.
    program = tl.program_id(0)
    token_blocks = tl.cdiv(num_tokens, ITEMS)
    if program < num_rows:
        _fill_row(plan, table, lengths, rows, pages, program, num_slots, table_len, PAGES)
    elif program < num_rows + token_blocks:
        token = (program - num_rows) * ITEMS + tl.arange(0, ITEMS)
        row = owners_of(plan, token, num_rows, TOKEN)
        inside, live = token < num_tokens, row < num_rows
        slot = field(plan, row, live, SLOT).to(tl.int64)
        position = token - field(plan, row, live, TOKEN)
        position = tl.where(live, position + length(lengths, slot, num_slots, live, COMMITTED), 0)
        token_id = tl.load(ids + slot * ids_len + position, mask=inside & live, other=0)
        tl.store(token_ids + token, token_id, mask=inside)
        tl.store(positions + token, position.to(tl.int32), mask=inside)
    else:
        line = (program - num_rows - token_blocks) * ITEMS + tl.arange(0, ITEMS)
        row = owners_of(plan, line, num_rows, LINE)
        inside, live = line < num_lines, row < num_rows
        slot = field(plan, row, live, SLOT).to(tl.int64)
        left = field(plan, row + 1, live, LINE) - line  # of the row's, and so of its tokens
        token = tl.where(live, field(plan, row + 1, live, TOKEN) - left, 0)
        position = line - field(plan, row, live, LINE) + length(lengths, slot, num_slots, live, TOTAL)
        tl.store(line_token + line, token, mask=inside)
        tl.store(line_slot + line, slot, mask=inside)
        tl.store(line_position + line, tl.where(live, position, 0), mask=inside)


@triton.jit
def _fill_row(plan, table, lengths, rows, pages, n, num_slots, table_len, PAGES: tl.constexpr):
    line = plan + n * WIDTH
    first, slot = tl.load(line + TOKEN), tl.load(line + SLOT).to(tl.int64)
    for base in range(0, table_len, PAGES):
        at = base + tl.arange(0, PAGES)
        page = tl.load(table + slot * table_len + at, mask=at < table_len)
        tl.store(pages + n.to(tl.int64) * table_len + at, page, mask=at < table_len)
    row = rows + n * 8  # plugins/rows.py
    tl.store(row, first)
    tl.store(row + 1, tl.load(line + WIDTH + TOKEN) - first)
    tl.store(row + 2, tl.load(line + NUM_DRAFTS))
    tl.store(row + 3, slot.to(tl.int32))
    tl.store(row + 4, tl.load(lengths + COMMITTED * num_slots + slot).to(tl.int32))
    tl.store(row + 5, tl.load(lengths + EDGE * num_slots + slot).to(tl.int32))
    tl.store(row + 6, tl.load(line + SNAPSHOT_SLOT))
    tl.store(row + 7, tl.load(line + SNAPSHOT_EDGE))
