"""The causal depthwise convolution, one token after the other."""

import torch

from hemiola.plugins.rows import live_rows


def conv(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, W]
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E] raw columns of the last tokens
    rows: torch.Tensor,  # [N, 8], see plugins/rows.py
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E], silu applied: a token reads its column and the W - 1 before; before position 0 are zeros."""
    ring_len, width = columns.shape[1], weight.shape[1]
    y = torch.zeros_like(x)
    for row in live_rows(rows, chunk_len):
        ring = columns[row.slot]
        window = [torch.zeros_like(bias)] * width
        for position in range(max(row.committed - width + 1, 0), row.end):
            token = row.first + position - row.committed
            column = ring[position % ring_len].clone() if position < row.committed else x[token]
            window = [*window[1:], column]
            if position >= row.committed:
                total = bias + sum(weight[:, i] * window[i] for i in range(width))
                y[token] = total / (1 + torch.exp(-total))
        if row.snapshot_slot > 0:
            for position in range(max(row.snapshot_edge - width + 1, 0), row.snapshot_edge):
                token = row.first + position - row.committed
                column = ring[position % ring_len] if position < row.committed else x[token]
                columns[row.snapshot_slot, position % ring_len] = column
        for position in range(max(row.committed, row.new_edge - width + 1), row.end):
            ring[position % ring_len] = x[row.first + position - row.committed]
    return y
