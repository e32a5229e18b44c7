"""A step's inputs, compiled."""

import torch

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_int, put_int, put_long
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import (
    LINE,
    NUM_DRAFTS,
    ROW_WIDTH,
    SLOT,
    SNAPSHOT_EDGE,
    SNAPSHOT_SLOT,
    TOKEN,
    count,
    known,
    length,
    put_row,
)
from hemiola.plugins.step.plan import COMMITTED, EDGE, TOTAL


def fill(
    plan: Operand,  # [N + 1, 10]
    table: Operand,  # [S, P]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    num_tokens: Number,
    num_lines: Number,
) -> tuple[Operand, ...]:
    """See reference.py."""
    code, num_rows = code_of(plan), plan.shape[0] + -1
    int32, int64 = torch.int32, torch.int64
    made = (
        code.empty(num_rows, ROW_WIDTH, dtype=int32),
        code.empty(num_rows, table.shape[1], dtype=int32),
        code.empty(num_tokens, dtype=int32),
        code.empty(num_tokens, dtype=int32),
        code.empty(num_lines, dtype=int32),
        code.empty(num_lines, dtype=int64),
        code.empty(num_lines, dtype=int64),
    )
    sizes = (num_rows, num_tokens, num_lines)
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code.call(_fill, 1, 0, *sizes, plan, table, table.shape[1], *ledger, *made)
    return made


@Kernel
def _fill(
    item, scratch, num_rows, num_tokens, num_lines, plan, table, table_len, lengths, num_slots, ids, ids_len,
    rows, page_table, token_ids, positions, line_token, line_slot, line_position,
):  # fmt: skip
    """One item: all rows, and zeros behind them."""
    for n in range(num_rows):
        first, num, slot = known(plan, n, TOKEN), count(plan, n, TOKEN), known(plan, n, SLOT)
        committed, drafts = length(lengths, num_slots, COMMITTED, slot), known(plan, n, NUM_DRAFTS)
        edge = length(lengths, num_slots, EDGE, slot)
        kept_in, kept_at = known(plan, n, SNAPSHOT_SLOT), known(plan, n, SNAPSHOT_EDGE)
        put_row(rows, n, first, num, drafts, slot, committed, edge, kept_in, kept_at)
        for i in range(table_len):
            put_int(page_table, n * table_len + i, get_int(table, slot * table_len + i))
        for i in range(num):
            put_int(token_ids, first + i, get_int(ids, slot * ids_len + committed + i))
            put_int(positions, first + i, committed + i)
        line, own, total = known(plan, n, LINE), count(plan, n, LINE), length(lengths, num_slots, TOTAL, slot)
        for i in range(own):
            put_int(line_token, line + i, first + num - own + i)
            put_long(line_slot, line + i, slot)
            put_long(line_position, line + i, total + i)
    for i in range(known(plan, num_rows, TOKEN), num_tokens):
        put_int(token_ids, i, 0)
        put_int(positions, i, 0)
    for i in range(known(plan, num_rows, LINE), num_lines):
        put_int(line_token, i, 0)
        put_long(line_slot, i, 0)
        put_long(line_position, i, 0)
