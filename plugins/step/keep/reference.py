"""The truth: one row after the other, its snapshot first."""

import torch

from hemiola.plugins.rows import RowFields
from hemiola.plugins.step.plan import EDGE


def keep(
    rows: torch.Tensor,  # [N, 8] of the trunk: before the step was accepted
    lengths: torch.Tensor,  # [4, S] after the step was accepted
    hidden: torch.Tensor,  # [T, F]
    ring: torch.Tensor,  # [S, R, F]
) -> None:
    """The hidden states of each row's last R tokens go into the ring of its slot, by position. Before that, a
    snapshot that the step took gets the state before its edge."""
    ring_len = ring.shape[1]
    for line in rows.tolist():
        row = RowFields(*line, 0, 0)
        if row.slot == 0:
            continue
        last = row.snapshot_edge - 1
        if row.snapshot_slot and row.edge <= last < int(lengths[EDGE, row.slot]):
            is_new = last >= row.committed
            state = hidden[row.first + last - row.committed] if is_new else ring[row.slot, last % ring_len]
            ring[row.snapshot_slot, last % ring_len] = state
        for token in range(max(0, row.num_tokens - ring_len), row.num_tokens):
            ring[row.slot, (row.committed + token) % ring_len] = hidden[row.first + token]
