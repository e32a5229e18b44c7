"""How compiled kernels read rows, and what is checked of them before any does."""

from math import prod

import torch

from hemiola.plugins.cpu.code import Case, Operand, code_of, complain
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import f32, get_int, get_long, put, put_long
from hemiola.plugins.rows import COLUMNS, RowFields
from hemiola.plugins.sizes import Number

CONTRADICTION, NO_ROOM, NO_SLOT = 1, 2, 3
LINE = ", ".join(f"'{name}': {{{n + 1}}}" for n, name in enumerate(COLUMNS))
CASES = (
    Case(ValueError, f"a row contradicts itself or chunk_len {{0}}: {LINE}"),
    Case(ValueError, "{0} records since an edge, but a ring holds {1}"),
    Case(IndexError, "rows name slot {0} and {1} tokens, but there are {2} slots and {3} tokens"),
)


def live_tokens(rows: Operand, num_tokens: Number, chunk_len: int, ring_len: int, num_slots: int) -> Operand:
    """How many tokens live rows bring, [1] int64.

    Refuses rows whose records a ring of `ring_len` cannot hold, and slots and tokens there are not.
    """
    code = code_of(rows)

    def check() -> Operand:
        live = code.empty(1, dtype=torch.int64)
        sizes = (rows.shape[0], num_tokens, chunk_len, ring_len, num_slots)
        code.call(_check, 1, rows.shape[0] * 5.0, *sizes, rows, live, code.fault(*CASES))
        return live

    return code.once(("rows", rows, chunk_len, ring_len, num_slots), check)


def owned(live: Operand, *shape: Number) -> Operand:
    """Room for results: zeros, if there are tokens of no live row, which nobody writes."""
    code = code_of(live)
    y = code.empty(*shape)
    code.call(_clear, 1, 0.0, shape[0], prod(shape[1:]), live, y)
    return y


@helper
def read_row(rows, n, chunk_len):
    """Line n of rows [N, 8], as RowFields."""
    at = 8 * n
    num_tokens, num_drafts, slot = get_int(rows, at + 1), get_int(rows, at + 2), get_int(rows, at + 3)
    committed, edge = get_int(rows, at + 4), get_int(rows, at + 5)
    snapshot, snapshot_edge = get_int(rows, at + 6), get_int(rows, at + 7)
    end = committed + (num_tokens if slot != 0 else 0)
    new_edge = (end - num_drafts) // chunk_len * chunk_len
    if end == committed or snapshot_edge <= edge or snapshot_edge > new_edge:
        snapshot = 0
    first = get_int(rows, at)
    return RowFields(
        first, num_tokens, num_drafts, slot, committed, edge, snapshot, snapshot_edge, end, new_edge
    )


@Kernel
def _check(item, scratch, num_rows, num_tokens, chunk_len, ring_len, num_slots, rows, live, fault):
    """One item: live = tokens of live rows, or a fault."""
    total = 0
    for n in range(num_rows):
        row = read_row(rows, n, chunk_len)
        if row.num_tokens == 0 or row.slot == 0:
            continue
        sane = row.edge >= 0 and row.edge % chunk_len == 0 and row.edge <= row.committed
        sane = sane and row.num_drafts >= 0 and row.num_drafts <= row.num_tokens
        if not sane or (get_int(rows, 8 * n + 6) != 0 and row.snapshot_edge % chunk_len != 0):
            put_long(fault, 1, chunk_len)
            for i in range(8):
                put_long(fault, 2 + i, get_int(rows, 8 * n + i))
            put_long(fault, 0, CONTRADICTION)
            return
        held = max(row.committed - row.edge, row.end - row.new_edge)
        lowest, highest = min(row.slot, row.snapshot_slot), max(row.slot, row.snapshot_slot)
        last = row.first + row.num_tokens
        if lowest < 0 or highest >= num_slots or row.first < 0 or last > num_tokens:
            put_long(fault, 1, lowest if lowest < 0 else highest)
            put_long(fault, 2, min(row.first, 0) if row.first < 0 else last)
            put_long(fault, 3, num_slots)
            put_long(fault, 4, num_tokens)
            put_long(fault, 0, NO_SLOT)
            return
        if held > ring_len:
            complain(fault, NO_ROOM, held, ring_len)
            return
        total += row.num_tokens
    put_long(live, 0, total)


@Kernel
def _clear(item, scratch, num_tokens, width, live, y):
    """One item: zeros where not all tokens belong to live rows."""
    if get_long(live, 0) != num_tokens:
        for i in range(num_tokens * width):
            put(y, i, f32(0.0))
