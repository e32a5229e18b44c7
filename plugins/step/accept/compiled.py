"""Which drafts stay, and the token behind them, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import f32, get, get_int, get_long, put_int, put_long
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import LINE, NUM_DRAFTS, SLOT, TOKEN, count, known, length, set_length
from hemiola.plugins.step.plan import ACCEPTED, BROKEN, COMMITTED, DRAFTS, EDGE, JUDGED, TOTAL


def accept(
    plan: Operand,  # [N + 1, 10]
    chosen: Operand,  # [L] int64
    logit: Operand,  # [L]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    answers: Operand,  # [N, width + 4 or more] int64
    width: Number,
    chunk_len: int,
) -> None:
    """See reference.py."""
    known = (plan.shape[0] + -1, width, answers.stride(0), chunk_len, plan, chosen, logit)
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code_of(plan).call(_accept, 1, 0, *known, *ledger, answers)


@helper
def _is_finite(value):
    return value - value == f32(0.0)


@Kernel
def _accept(
    item, scratch, num_rows, width, answers_len, chunk_len, plan, chosen, logit, lengths, num_slots, ids,
    ids_len, answers,
):  # fmt: skip
    """One item: all rows."""
    for n in range(num_rows):
        slot = known(plan, n, SLOT)
        if slot == 0:
            continue
        drafts, line, own = known(plan, n, NUM_DRAFTS), known(plan, n, LINE), count(plan, n, LINE)
        final = length(lengths, num_slots, COMMITTED, slot) + count(plan, n, TOKEN) - drafts
        set_length(lengths, num_slots, COMMITTED, slot, final)
        set_length(lengths, num_slots, EDGE, slot, final - final % chunk_len)
        if own == 0:
            continue
        total, at = length(lengths, num_slots, TOTAL, slot), n * answers_len
        judged, accepted = min(drafts, length(lengths, num_slots, DRAFTS, slot)), 0
        for i in range(own):
            put_long(answers, at + i, get_long(chosen, line + i))
        while (
            accepted < judged
            and _is_finite(get(logit, line + accepted))
            and get_long(chosen, line + accepted) == get_int(ids, slot * ids_len + total + accepted)
        ):
            accepted += 1
        put_int(ids, slot * ids_len + total + accepted, get_long(chosen, line + accepted))
        set_length(lengths, num_slots, TOTAL, slot, total + accepted + 1)
        set_length(lengths, num_slots, COMMITTED, slot, total + accepted)
        set_length(lengths, num_slots, DRAFTS, slot, 0)
        put_long(answers, at + width + ACCEPTED, accepted)
        put_long(answers, at + width + JUDGED, judged)
        put_long(answers, at + width + BROKEN, 0 if _is_finite(get(logit, line + accepted)) else 1)
