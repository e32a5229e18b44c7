"""The causal depthwise convolution over all rows at once: one multiplication and addition per tap.

The rows' windows (W - 1 columns before the first new token, then the new ones) lie one behind the other in
one tensor, and the taps are that tensor shifted; what straddles two rows is dropped. Bits do not depend on
how a sequence is split: a number meets its taps in one order, by single multiplications and additions, and
silu is written with exp because torch's own rounds the ends of a tensor differently.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.bits import IN_CACHE
from hemiola.plugins.grid import check_ring, row_table, rows_key


def conv(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, W]
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E], silu applied; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    width = weight.shape[1]
    plan = _plan(rows_key(rows), x.shape[0], chunk_len, columns.shape[1], width)
    if plan is None:
        return torch.zeros_like(x)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    new = x.to(columns.dtype)
    ring = columns.view(-1, columns.shape[2])
    source = ring if plan.from_ring else torch.cat([ring.index_select(0, plan.record_ids), new])
    ring.index_copy_(0, plan.stored_ids, new if plan.stored is None else new.index_select(0, plan.stored))
    if plan.shots is not None:
        ring.index_copy_(0, plan.shots.ring_ids, source.index_select(0, plan.shots.sources))
    windows = source.index_select(0, plan.windows).to(exact)
    if plan.before is not None:
        windows.index_fill_(0, plan.before, 0)

    y = _convolve(windows, weight.to(exact).mT.contiguous(), bias.to(exact))
    if plan.kept is not None:
        y = y.index_select(0, plan.kept)
    if plan.live is not None:
        y = y.new_zeros(x.shape).index_copy_(0, plan.live, y)
    return y.to(x.dtype)


def _convolve(windows: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """silu(sum over taps + bias) at every place of [places, E] that has all taps [W, E], piece by piece."""
    (width, channels), num = taps.shape, windows.shape[0] - taps.shape[0] + 1
    y = windows.new_empty(num, channels)
    for part in y.split(max(1, IN_CACHE // channels)):
        start = int(part.storage_offset()) // channels
        torch.mul(windows.narrow(0, start, part.shape[0]), taps[0], out=part)
        for tap in range(1, width):
            part += windows.narrow(0, start + tap, part.shape[0]) * taps[tap]
        part += bias
        part /= (-part).exp_().add_(1)
    return y


class _Plan(NamedTuple):
    from_ring: bool  # the rings can hold every window at once
    record_ids: torch.Tensor  # else the columns that only the rings hold: of windows, then of snapshots
    windows: torch.Tensor  # into the rings, or into records and new tokens: every row's window, row after row
    before: torch.Tensor | None  # places of windows before position 0
    kept: torch.Tensor | None  # sums that do not straddle two rows, in token order; None if all
    live: torch.Tensor | None  # tokens that belong to a row, None if all
    stored: torch.Tensor | None  # tokens to write to the rings, None if all
    stored_ids: torch.Tensor
    shots: "_Shots | None"


class _Shots(NamedTuple):
    """The W - 1 columns before the edges of snapshots."""

    sources: torch.Tensor  # into records and new tokens
    ring_ids: torch.Tensor  # in rings of [slots * ring] columns


@lru_cache(maxsize=8)  # keyed by the rows' content: the layers of one step ask the same question
def _plan(key: bytes, num_tokens: int, chunk_len: int, ring_len: int, width: int) -> _Plan | None:
    table = row_table(key, chunk_len)
    if table.shape[1] == 0:
        return None
    check_ring(table, ring_len - width + 1)
    slot, first, committed, end, _, new_edge = table[:6]
    # one line per place of a window: positions committed - W + 1 .. end of each row
    lens = end - committed + width - 1
    row = np.repeat(np.arange(slot.size), lens)
    place = np.arange(row.size) - (np.cumsum(lens) - lens - committed + width - 1)[row]
    is_new = place >= committed[row]
    is_record = ~is_new & (place >= 0)
    token_ids = place + (first - committed)[row]
    ring_ids = slot[row] * ring_len + place % ring_len
    num_records = int(is_record.sum())
    shot_records, shots = _shots(table, ring_len, width, num_records)
    from_ring = shots is None and int(lens.max()) <= ring_len
    if from_ring:
        windows = ring_ids
    else:
        windows = np.where(is_new, token_ids + num_records + shot_records.size, 0)
        windows[is_record] = np.arange(num_records)
    before = np.flatnonzero(place < 0)
    kept = np.flatnonzero(is_new) - (width - 1)
    live = token_ids[is_new]
    is_stored = is_new if from_ring else is_new & (place > (new_edge - width)[row])
    stored = token_ids[is_stored]
    return _Plan(
        from_ring=from_ring,
        record_ids=torch.from_numpy(np.concatenate([ring_ids[is_record], shot_records])),
        windows=torch.from_numpy(windows),
        before=torch.from_numpy(before) if before.size else None,
        kept=None if slot.size == 1 else torch.from_numpy(kept),
        live=None if live.size == num_tokens else torch.from_numpy(live),
        stored=None if stored.size == num_tokens else torch.from_numpy(stored),
        stored_ids=torch.from_numpy(ring_ids[is_stored]),
        shots=shots,
    )


def _shots(
    table: np.ndarray, ring_len: int, width: int, num_records: int
) -> tuple[np.ndarray, _Shots | None]:
    """What snapshots take: the records among it, which come behind `num_records` others, and all of it."""
    slot, first, committed, _, _, _, snapshot, snapshot_edge = table[:, table[6] > 0, None]
    place = snapshot_edge + np.arange(1 - width, 0)
    is_record = (place >= 0) & (place < committed)
    records = (slot * ring_len + place % ring_len)[is_record]
    if not slot.size:
        return records, None
    sources = place - committed + first + num_records + records.size
    sources[is_record] = np.arange(num_records, num_records + records.size)
    held = place >= 0
    ring_ids = snapshot * ring_len + place % ring_len
    return records, _Shots(torch.from_numpy(sources[held]), torch.from_numpy(ring_ids[held]))
