"""Mamba2's recurrence, one token after the other."""

import torch
import torch.nn.functional as F

from hemiola.plugins.rows import live_rows


def mamba2(
    x: torch.Tensor,  # [T, H, P]
    B: torch.Tensor,  # [T, G, D]
    C: torch.Tensor,  # [T, G, D]
    dt: torch.Tensor,  # [T, H] as projected
    dt_bias: torch.Tensor,  # [H]
    A: torch.Tensor,  # [H] negative
    D: torch.Tensor,  # [H]
    state: torch.Tensor,  # [S, H, P, D]
    x_records: torch.Tensor,  # [S, R, H, P]
    B_records: torch.Tensor,  # [S, R, G, D]
    dt_records: torch.Tensor,  # [S, R, H]
    rows: torch.Tensor,  # [N, 8], see plugins/rows.py
    chunk_len: int,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """y[T, H, P], the D * x term included (Dao and Gu 2024, arXiv 2405.21060; modeling_nemotron_h.py).

    With dt_t = softplus(dt + dt_bias), kept within dt_min .. dt_max:
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t (x) B_t,  y_t = h_t C_t + D x_t
    In chunks, with the edge state S0 and a = cumsum(dt A):
        y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
        S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
    """
    ring_len, per_group = x_records.shape[1], x.shape[1] // B.shape[1]
    y = torch.zeros_like(x)
    steps = torch.zeros(dt.shape, dtype=dt_records.dtype)
    for t in range(len(dt)):
        steps[t] = F.softplus(dt[t].to(steps.dtype) + dt_bias).clamp(dt_min, dt_max)
    for row in live_rows(rows, chunk_len):
        slot = row.slot
        h = torch.zeros_like(state[slot]) if row.committed == 0 else state[slot].clone()
        at_edge = h
        for position in range(row.edge, row.end):
            place = position % ring_len
            token = row.first + position - row.committed
            if position < row.committed:
                x_t, B_t, dt_t = x_records[slot, place], B_records[slot, place], dt_records[slot, place]
            else:
                x_t, B_t, dt_t = x[token], B[token], steps[token]
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
            for ring, tensor in zip((x_records, B_records, dt_records), (x, B, steps), strict=True):
                ring[slot, position % ring_len] = tensor[token]
    return y
