"""The rows of a step, as every op reads them: `rows` [N, 8] int32, one line per row.

Row n owns the tokens first .. first + num_tokens of the step. They stand at the absolute positions
committed, committed + 1, ...; the last num_drafts of them are only proposed. The row's slot holds the state
after `edge` tokens and records of the tokens edge .. committed. After the step it holds the state at the new
edge (the last chunk edge that final tokens have passed) and records from there on. If snapshot_slot is not 0
and the step passes snapshot_edge (edge < snapshot_edge <= new edge), that slot becomes one that stands at
snapshot_edge, without records; else it is left alone. Slot 0 is the dump slot: rows of it are padding, of
which nothing is read or kept. Tokens of no live row come out as zeros.
"""

from typing import NamedTuple

import numpy as np
import torch


class RowFields(NamedTuple):
    """The columns of `rows`, then what follows from them."""

    first: int
    num_tokens: int
    num_drafts: int
    slot: int
    committed: int
    edge: int
    snapshot_slot: int  # 0 unless the step passes snapshot_edge
    snapshot_edge: int
    end: int  # the position behind the last token; `committed` where the row is padding
    new_edge: int  # where the slot's state stands after the step


COLUMNS = RowFields._fields[:8]


def live_rows(rows: torch.Tensor, chunk_len: int) -> list[RowFields]:
    """The rows that do something. Raises ValueError where lengths, edges and chunk_len contradict."""
    return [RowFields(*line) for line in _live(rows.numpy().tobytes(), chunk_len).tolist()]


def _live(content: bytes, chunk_len: int) -> np.ndarray:
    """Rows that do something, one per line, with all of RowFields."""
    table = np.frombuffer(content, np.int32).reshape(-1, len(COLUMNS)).astype(np.int64)
    table = table[(table[:, 1] != 0) & (table[:, 3] != 0)]
    _, num_tokens, num_drafts, _, committed, edge, snapshot, snapshot_edge = table.T
    end = committed + num_tokens
    new_edge = (end - num_drafts) // chunk_len * chunk_len
    sane = (edge >= 0) & (edge % chunk_len == 0) & (edge <= committed) & (num_drafts >= 0)
    sane &= (num_drafts <= num_tokens) & ((snapshot == 0) | (snapshot_edge % chunk_len == 0))
    if not sane.all():
        bad = dict(zip(COLUMNS, table[np.flatnonzero(~sane)[0]].tolist(), strict=True))
        raise ValueError(f"a row contradicts itself or chunk_len {chunk_len}: {bad}")
    table[:, 6] = np.where((edge < snapshot_edge) & (snapshot_edge <= new_edge), snapshot, 0)
    return np.column_stack((table, end, new_edge))
