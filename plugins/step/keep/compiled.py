"""What a drafting head will read later, compiled."""

from hemiola.plugins.cpu.code import Operand, code_of, numel
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import get_int
from hemiola.plugins.step.compiled import (
    ROW_COMMITTED,
    ROW_EDGE,
    ROW_FIRST,
    ROW_NUM_TOKENS,
    ROW_SLOT,
    ROW_SNAPSHOT_EDGE,
    ROW_SNAPSHOT_SLOT,
    ROW_WIDTH,
    length,
)
from hemiola.plugins.step.plan import EDGE


def keep(
    rows: Operand,  # [N, 8]
    lengths: Operand,  # [4, S]
    hidden: Operand,  # [T, F]
    ring: Operand,  # [S, R, F]
) -> None:
    """See reference.py."""
    cost = numel(hidden) * 0.1
    known = (rows, lengths, lengths.shape[1], hidden, hidden.stride(0), ring, *ring.shape[1:])
    code_of(rows).call(_keep, rows.shape[0], cost, *known)


@Kernel
def _keep(n, scratch, rows, lengths, num_slots, hidden, hidden_len, ring, ring_len, width):
    """An item is a row."""
    at = n * ROW_WIDTH
    first, num = get_int(rows, at + ROW_FIRST), get_int(rows, at + ROW_NUM_TOKENS)
    slot, committed = get_int(rows, at + ROW_SLOT), get_int(rows, at + ROW_COMMITTED)
    target, last = get_int(rows, at + ROW_SNAPSHOT_SLOT), get_int(rows, at + ROW_SNAPSHOT_EDGE) - 1
    if slot == 0:
        return
    if target > 0 and get_int(rows, at + ROW_EDGE) <= last and last < length(lengths, num_slots, EDGE, slot):
        place = (target * ring_len + last % ring_len) * width
        if last >= committed:
            move(hidden, (first + last - committed) * hidden_len, ring, place, width)
        else:
            move(ring, (slot * ring_len + last % ring_len) * width, ring, place, width)
    for i in range(max(0, num - ring_len), num):
        place = (slot * ring_len + (committed + i) % ring_len) * width
        move(hidden, (first + i) * hidden_len, ring, place, width)
