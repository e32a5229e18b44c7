"""The rows of a step, as every op reads them: `rows` [N, 8] int32, one line per row.

Row n owns the tokens first .. first + num_tokens of the step. They stand at the absolute positions
committed, committed + 1, ...; the last num_drafts of them are only proposed. The row's slot holds the state
after `edge` tokens and records of the tokens edge .. committed. After the step it holds the state at the new
edge (the last chunk edge that final tokens have passed) and records from there on. If snapshot_slot is not 0
and the step passes snapshot_edge (edge < snapshot_edge <= new edge), that slot becomes one that stands at
snapshot_edge, without records; else it is left alone. Slot 0 is the dump slot: rows of it are padding, of
which nothing is read or kept. Tokens of no live row come out as zeros.
"""

from functools import lru_cache
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


class Extent(NamedTuple):
    """What a step asks of a recurrent op."""

    num_tokens: int  # that live rows bring
    num_updates: int  # tokens that states move over: records, then new ones
    num_held: int  # tokens since an edge that a ring must hold
    highest_slot: int
    last_token: int  # behind the last token of any row


def next_edge(committed: int, num_tokens: int, num_drafts: int, chunk_len: int) -> int:
    """The last chunk edge that final tokens have passed: where a slot's state stands after a step."""
    return (committed + num_tokens - num_drafts) // chunk_len * chunk_len


def live_rows(rows: torch.Tensor, chunk_len: int) -> list[RowFields]:
    """The rows that do something. Raises ValueError where lengths, edges and chunk_len contradict."""
    return [RowFields(*line) for line in _live(rows.numpy().tobytes(), chunk_len).tolist()]


def extent(rows: torch.Tensor, chunk_len: int, ring_len: int, num_slots: int, num_tokens: int) -> Extent:
    """Refuses rows whose records a ring of `ring_len` cannot hold, and slots and tokens there are not."""
    found = _extent(rows.numpy().tobytes(), chunk_len)
    if found.num_held > ring_len:
        raise ValueError(f"{found.num_held} records since an edge, but a ring holds {ring_len}")
    if found.highest_slot >= num_slots or found.last_token > num_tokens:
        raise IndexError(
            f"rows name slot {found.highest_slot} and {found.last_token} tokens, but there are "
            f"{num_slots} slots and {num_tokens} tokens"
        )
    return found


@lru_cache(maxsize=8)  # the layers of one step ask the same question
def _extent(content: bytes, chunk_len: int) -> Extent:
    live = _live(content, chunk_len)
    first, num_tokens, _, slot, committed, edge, snapshot, _, end, new_edge = live.T
    if (live[:, [0, 3, 6]] < 0).any():
        raise IndexError(f"rows name slot {min(slot.min(), snapshot.min())} and token {first.min()}")
    return Extent(
        num_tokens=int(num_tokens.sum()),
        num_updates=int((end - edge).sum()),
        num_held=int(np.maximum(committed - edge, end - new_edge).max(initial=0)),
        highest_slot=int(np.maximum(slot, snapshot).max(initial=0)),
        last_token=int((first + num_tokens).max(initial=0)),
    )


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
