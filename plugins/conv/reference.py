"""A causal depthwise convolution with silu, one token after the other."""

import torch

from hemiola.plugins.grid import step_rows


def conv(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, W]; the last column meets the token itself
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E] raw inputs by position % R
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """silu(bias + sum_w weight[:, w] * x of W - 1 - w tokens ago), [T, E]. A snapshot is the whole ring."""
    ring_len, width = columns.shape[1], weight.shape[1]
    y = torch.zeros_like(x)
    for row in step_rows((cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot), chunk_len):
        ring = columns[row.slot_id]
        for position in range(row.committed, row.end):
            token = row.first + position - row.committed
            ring[position % ring_len] = x[token]
            total = bias.clone()
            for w in range(width):
                past = position - (width - 1 - w)
                if past >= 0:
                    total = total + weight[:, w] * ring[past % ring_len]
            y[token] = total / (1 + torch.exp(-total))
        if row.snapshot_slot > 0:
            columns[row.snapshot_slot] = ring
    return y
