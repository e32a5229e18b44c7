"""How a compiled kernel reads a row."""

from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import get_int
from hemiola.plugins.rows import RowFields


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
