"""What the compiled ops of a step share: how they read a plan and the ledger."""

from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import get_int, get_long, put_int, put_long
from hemiola.plugins.rows import COLUMNS as ROW_COLUMNS
from hemiola.plugins.step.plan import COLUMNS

TOKEN, LINE, PAIR, DRAFT, SLOT, NUM_DRAFTS, ROOM, OWED, SNAPSHOT_SLOT, SNAPSHOT_EDGE = range(len(COLUMNS))
WIDTH = len(COLUMNS)
ROW_WIDTH = len(ROW_COLUMNS)
(
    ROW_FIRST, ROW_NUM_TOKENS, ROW_DRAFTS, ROW_SLOT, ROW_COMMITTED, ROW_EDGE, ROW_SNAPSHOT_SLOT,
    ROW_SNAPSHOT_EDGE,
) = range(ROW_WIDTH)  # fmt: skip


@helper
def known(plan, n, column):
    """Of row n; of the cumulative columns, where row n begins and row n - 1 ends."""
    return get_int(plan, n * WIDTH + column)


@helper
def count(plan, n, column):
    """How many items of a cumulative column row n owns."""
    return get_int(plan, (n + 1) * WIDTH + column) - get_int(plan, n * WIDTH + column)


@helper
def length(lengths, num_slots, which, slot):
    """One of the ledger's lengths."""
    return get_long(lengths, which * num_slots + slot)


@helper
def set_length(lengths, num_slots, which, slot, value):
    put_long(lengths, which * num_slots + slot, value)


@helper
def put_row(rows, n, first, num_tokens, num_drafts, slot, committed, edge, snapshot_slot, snapshot_edge):
    """Line n of plugins/rows.py."""
    at = n * ROW_WIDTH
    put_int(rows, at + ROW_FIRST, first)
    put_int(rows, at + ROW_NUM_TOKENS, num_tokens)
    put_int(rows, at + ROW_DRAFTS, num_drafts)
    put_int(rows, at + ROW_SLOT, slot)
    put_int(rows, at + ROW_COMMITTED, committed)
    put_int(rows, at + ROW_EDGE, edge)
    put_int(rows, at + ROW_SNAPSHOT_SLOT, snapshot_slot)
    put_int(rows, at + ROW_SNAPSHOT_EDGE, snapshot_edge)
