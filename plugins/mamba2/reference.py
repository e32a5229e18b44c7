"""Mamba2's recurrence, one token after the other."""

import torch

from hemiola.plugins.grid import step_rows


def mamba2(
    x: torch.Tensor,  # [T, H, P]
    B: torch.Tensor,  # [T, G, D]
    C: torch.Tensor,  # [T, G, D]
    dt: torch.Tensor,  # [T, H] final: after bias, softplus and clamp
    A: torch.Tensor,  # [H] negative
    D: torch.Tensor,  # [H]
    state: torch.Tensor,  # [S, H, P, D]
    x_records: torch.Tensor,  # [S, R, H, P]
    B_records: torch.Tensor,  # [S, R, G, D]
    dt_records: torch.Tensor,  # [S, R, H]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """y[T, H, P], the D * x term included."""
    ring_len, per_group = x_records.shape[1], x.shape[1] // B.shape[1]
    y = torch.zeros_like(x)
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    for row in step_rows(rows, chunk_len):
        slot = row.slot_id
        h = torch.zeros_like(state[slot]) if row.committed == 0 else state[slot].clone()
        at_edge = h
        for position in range(row.edge, row.end):
            place = position % ring_len
            token = row.first + position - row.committed
            if position < row.committed:
                x_t, B_t, dt_t = x_records[slot, place], B_records[slot, place], dt_records[slot, place]
            else:
                x_t, B_t, dt_t = x[token], B[token], dt[token]
            B_t = B_t.repeat_interleave(per_group, 0)
            h = h * torch.exp(dt_t * A)[:, None, None] + (dt_t[:, None] * x_t)[:, :, None] * B_t[:, None, :]
            if position >= row.committed:
                C_t = C[token].repeat_interleave(per_group, 0)
                y[token] = (h * C_t[:, None, :]).sum(-1) + D[:, None] * x_t
            if position + 1 == row.new_edge:
                at_edge = h
            if row.snapshot_slot > 0 and position + 1 == row.snapshot_edge:
                state[row.snapshot_slot] = h
        state[slot] = at_edge
        for position in range(max(row.committed, row.new_edge), row.end):
            token = row.first + position - row.committed
            for ring, tensor in zip((x_records, B_records, dt_records), (x, B, dt), strict=True):
                ring[slot, position % ring_len] = tensor[token]
    return y
