"""How kernels read a step's plan; plan.py says what is in it."""

import triton
import triton.language as tl

from hemiola.plugins.rows import COLUMNS
from hemiola.plugins.step import plan

(
    TOKEN, LINE, PAIR, DRAFT, SLOT, NUM_DRAFTS, ROOM, OWED, SNAPSHOT_SLOT, SNAPSHOT_EDGE,
) = (tl.constexpr(column) for column in range(len(plan.COLUMNS)))  # fmt: skip
WIDTH = tl.constexpr(len(plan.COLUMNS))
TOTAL, COMMITTED, EDGE, DRAFTS = (
    tl.constexpr(n) for n in (plan.TOTAL, plan.COMMITTED, plan.EDGE, plan.DRAFTS)
)
ACCEPTED, JUDGED, BROKEN, PROPOSED, ANSWERS = (
    tl.constexpr(n) for n in (plan.ACCEPTED, plan.JUDGED, plan.BROKEN, plan.PROPOSED, plan.ANSWERS)
)
START = tl.constexpr(COLUMNS.index("committed"))  # of a row
_LINES = tl.constexpr(128)  # of the plan, read at once


@triton.jit
def owners_of(plan, item, num_rows, COLUMN: tl.constexpr):
    """The row of each of these items, by a cumulative column; num_rows for items behind the end."""
    row = tl.zeros_like(item)
    for base in range(0, num_rows, _LINES):
        line = base + 1 + tl.arange(0, _LINES)
        here = line <= num_rows
        first = tl.load(plan + line * WIDTH + COLUMN, mask=here, other=0)
        row += tl.sum((here[None, :] & (first[None, :] <= item[:, None])).to(tl.int32), axis=1)
    return row


@triton.jit
def field(plan, row, live, COLUMN: tl.constexpr):
    """A column of these rows; 0 for those that are not live."""
    return tl.load(plan + row * WIDTH + COLUMN, mask=live, other=0)


@triton.jit
def length(lengths, slot, num_slots, live, WHICH: tl.constexpr):
    """One of the lengths of these slots; 0 for those that are not live."""
    return tl.load(lengths + WHICH * num_slots + slot, mask=live, other=0)


@triton.jit
def write_head_rows(head_rows, n, first, num, slot, start, is_row):
    """Rows of a drafting head (plugins/rows.py): it has no drafts of its own, and no edges."""
    for column in tl.static_range(8):  # type: ignore[attr-defined]
        value = tl.zeros_like(num)
        if column == 0:
            value = first
        elif column == 1:
            value = num
        elif column == 3:
            value = slot
        elif column == START:
            value = start
        tl.store(head_rows + n * 8 + column, value, mask=is_row)
