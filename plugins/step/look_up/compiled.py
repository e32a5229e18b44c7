"""Drafts by prompt lookup, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_int, put_int
from hemiola.plugins.step.compiled import ROOM, SLOT, known, length, set_length
from hemiola.plugins.step.plan import DRAFTS, TOTAL


def look_up(
    plan: Operand,  # [N + 1, 10]
    lengths: Operand,  # [4, S]
    ids: Operand,  # [S, W]
    min_n: int,
    max_n: int,
) -> None:
    """See reference.py."""
    num_rows, cost = plan.shape[0] + -1, 2.0 * ids.shape[1]
    ledger = (lengths, lengths.shape[1], ids, ids.shape[1])
    code_of(plan).call(_look_up, num_rows, num_rows * cost, min_n, max_n, plan, *ledger)


@Kernel
def _look_up(n, scratch, min_n, max_n, plan, lengths, num_slots, ids, ids_len):
    """An item is a row."""
    slot, room = known(plan, n, SLOT), known(plan, n, ROOM)
    if slot == 0 or room == 0:
        return
    text, end = ids + 4 * slot * ids_len, length(lengths, num_slots, TOTAL, slot)
    last, best, longest = end - 1, -1, min_n - 1
    for place in range(last - 1, -1, -1):
        if get_int(text, place) != get_int(text, last):
            continue
        num = 1
        while num < max_n and num <= place and get_int(text, place - num) == get_int(text, last - num):
            num += 1
        if num > longest:
            best, longest = place, num
            if num == max_n:
                break
    if best < 0:
        set_length(lengths, num_slots, DRAFTS, slot, 0)
        return
    for i in range(room):
        put_int(text, end + i, get_int(text, best + 1 + i % (last - best)))
    set_length(lengths, num_slots, DRAFTS, slot, room)
