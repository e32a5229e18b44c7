"""What a drafting head reads to bring one more draft, compiled."""

import torch

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_int, put_int
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import DRAFT, ROOM, ROW_WIDTH, SLOT, count, known, length, put_row
from hemiola.plugins.step.plan import TOTAL


def next_pairs(
    plan: Operand,  # [N + 1, 10]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    number: Number,
    num_drafting: Number,
) -> tuple[Operand, ...]:
    """See reference.py."""
    code, num_rows = code_of(plan), plan.shape[0] + -1
    made = (
        code.empty(num_rows, ROW_WIDTH, dtype=torch.int32),
        code.empty(num_drafting, dtype=torch.int32),
        code.empty(num_drafting, dtype=torch.int32),
    )
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code.call(_next_pairs, 1, 0, num_rows, num_drafting, number, plan, *ledger, *made)
    return made


@Kernel
def _next_pairs(
    item, scratch, num_rows, num_drafting, number, plan, lengths, num_slots, ids, ids_len, head_rows,
    token_ids, positions,
):  # fmt: skip
    """One item: all rows, and zeros behind them."""
    for n in range(num_rows):
        draft, own = known(plan, n, DRAFT), count(plan, n, DRAFT)
        slot, place, token = 0, 0, 0
        if own and known(plan, n, ROOM) > number:
            slot = known(plan, n, SLOT)
            place = length(lengths, num_slots, TOTAL, slot) + number - 1
            token = get_int(ids, slot * ids_len + place)
        put_row(head_rows, n, draft, own, 0, slot, place, 0, 0, 0)
        if own:
            put_int(token_ids, draft, token)
            put_int(positions, draft, place)
    for i in range(known(plan, num_rows, DRAFT), num_drafting):
        put_int(token_ids, i, 0)
        put_int(positions, i, 0)
