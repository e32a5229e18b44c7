"""What a drafting head reads first, compiled."""

import torch

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import f32, get_int, put, put_int, put_long
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import (
    DRAFT,
    OWED,
    PAIR,
    ROOM,
    ROW_COMMITTED,
    ROW_WIDTH,
    SLOT,
    TOKEN,
    count,
    known,
    length,
    put_row,
    set_length,
)
from hemiola.plugins.step.plan import COMMITTED, DRAFTS


def first_pairs(
    plan: Operand,  # [N + 1, 10]
    rows: Operand,  # [N, 8]
    hidden: Operand,  # [T, F]
    ring: Operand,  # [S, R, F]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    num_pairs: Number,
    num_drafting: Number,
) -> tuple[Operand, ...]:
    """See reference.py."""
    code, num_rows, (ring_len, features) = code_of(plan), plan.shape[0] + -1, ring.shape[1:]
    int32 = torch.int32
    made = (
        code.empty(num_rows, ROW_WIDTH, dtype=int32),
        code.empty(num_pairs, dtype=int32),
        code.empty(num_pairs, features),
        code.empty(num_pairs, dtype=int32),
        code.empty(num_drafting, dtype=int32),
        code.empty(num_drafting, dtype=torch.int64),
    )
    sizes = (num_rows, num_pairs, num_drafting)
    states = (hidden, hidden.stride(0), ring, ring_len, features)
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code.call(_first_pairs, 1, 0, *sizes, plan, rows, *states, *ledger, *made)
    return made


@Kernel
def _first_pairs(
    item, scratch, num_rows, num_pairs, num_drafting, plan, rows, hidden, hidden_len, ring, ring_len, width,
    lengths, num_slots, ids, ids_len, head_rows, token_ids, before, positions, wanted, draft_slot,
):  # fmt: skip
    """One item: all rows, and zeros behind them."""
    for n in range(num_rows):
        slot, first, pair, num = known(plan, n, SLOT), known(plan, n, TOKEN), known(plan, n, PAIR), 0
        owed, committed = known(plan, n, OWED), get_int(rows, n * ROW_WIDTH + ROW_COMMITTED)
        num = count(plan, n, PAIR)
        start = committed + 1 - owed
        put_row(head_rows, n, pair, num, 0, slot if num else 0, start if num else 0, 0, 0, 0)
        for i in range(num):
            place = start + i
            put_int(token_ids, pair + i, get_int(ids, slot * ids_len + place))
            put_int(positions, pair + i, place)
            if place <= committed:
                state = (slot * ring_len + (place - 1) % ring_len) * width
                move(ring, state, before, (pair + i) * width, width)
            else:
                state = (first + place - 1 - committed) * hidden_len
                move(hidden, state, before, (pair + i) * width, width)
        if count(plan, n, DRAFT):
            draft, num_new = known(plan, n, DRAFT), length(lengths, num_slots, COMMITTED, slot) - committed
            put_int(wanted, draft, pair + owed + num_new - 1)
            put_long(draft_slot, draft, slot)
            set_length(lengths, num_slots, DRAFTS, slot, known(plan, n, ROOM))
    for i in range(known(plan, num_rows, PAIR), num_pairs):
        _clear_pair(i, token_ids, before, positions, width)
    for i in range(known(plan, num_rows, DRAFT), num_drafting):
        put_int(wanted, i, 0)
        put_long(draft_slot, i, 0)


@helper
def _clear_pair(pair, token_ids, before, positions, width):
    put_int(token_ids, pair, 0)
    put_int(positions, pair, 0)
    for i in range(width):
        put(before, pair * width + i, f32(0.0))
