"""A draft of each row, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_long, put_int
from hemiola.plugins.sizes import Number
from hemiola.plugins.step.compiled import DRAFT, ROOM, SLOT, count, known, length
from hemiola.plugins.step.plan import TOTAL


def write(
    plan: Operand,  # [N + 1, 10]
    chosen: Operand,  # [D] int64
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    number: Number,
) -> None:
    """See reference.py."""
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code_of(plan).call(_write, 1, 0, plan.shape[0] + -1, number, plan, chosen, *ledger)


@Kernel
def _write(item, scratch, num_rows, number, plan, chosen, lengths, num_slots, ids, ids_len):
    """One item: all rows."""
    for n in range(num_rows):
        if count(plan, n, DRAFT) and known(plan, n, ROOM) > number:
            slot = known(plan, n, SLOT)
            place = slot * ids_len + length(lengths, num_slots, TOTAL, slot) + number
            put_int(ids, place, get_long(chosen, known(plan, n, DRAFT)))
