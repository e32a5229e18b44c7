"""What was proposed, for the host, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_int, put_long
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import LINE, SLOT, count, known, length
from hemiola.plugins.step.plan import ANSWERS, DRAFTS, PROPOSED, TOTAL


def tell(
    plan: Operand,  # [N + 1, 10]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    answers: Operand,  # [N, width + 4 + most, or more] int64
    width: Number,
    most: int,
) -> None:
    """See reference.py."""
    sizes = (plan.shape[0] + -1, width, answers.stride(0), most)
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code_of(plan).call(_tell, 1, 0, *sizes, plan, *ledger, answers)


@Kernel
def _tell(item, scratch, num_rows, width, answers_len, most, plan, lengths, num_slots, ids, ids_len, answers):
    """One item: all rows."""
    for n in range(num_rows):
        if count(plan, n, LINE) == 0:
            continue
        slot, at = known(plan, n, SLOT), n * answers_len + width
        put_long(answers, at + PROPOSED, length(lengths, num_slots, DRAFTS, slot))
        text = slot * ids_len + length(lengths, num_slots, TOTAL, slot)
        for i in range(most):
            put_long(answers, at + ANSWERS + i, get_int(ids, text + i))
