"""The truth: one row after the other, its snapshot first."""

import torch

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
        first, num_tokens, _, slot, committed, edge, snapshot_slot, snapshot_edge = line
        if slot == 0:
            continue
        last = snapshot_edge - 1
        if snapshot_slot and edge <= last < int(lengths[EDGE, slot]):
            is_new = last >= committed
            state = hidden[first + last - committed] if is_new else ring[slot, last % ring_len]
            ring[snapshot_slot, last % ring_len] = state
        for token in range(max(0, num_tokens - ring_len), num_tokens):
            ring[slot, (committed + token) % ring_len] = hidden[first + token]
