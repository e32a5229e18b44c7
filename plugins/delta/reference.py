"""The gated delta rule, one token after the other; a decay per channel makes it KDA."""

import torch
import torch.nn.functional as F

from hemiola.plugins.rows import live_rows


def delta(
    q: torch.Tensor,  # [T, G, K] normalised and scaled
    k: torch.Tensor,  # [T, G, K] normalised
    v: torch.Tensor,  # [T, H, V]
    a: torch.Tensor,  # [T, H, J] as projected; J = 1, or K: a decay per channel
    b: torch.Tensor,  # [T, H] as projected
    dt_bias: torch.Tensor,  # [H, J]
    A: torch.Tensor,  # [H] negative
    state: torch.Tensor,  # [S, H, K, V]
    k_records: torch.Tensor,  # [S, R, G, K]
    v_records: torch.Tensor,  # [S, R, H, V]
    g_records: torch.Tensor,  # [S, R, H, J]
    beta_records: torch.Tensor,  # [S, R, H]
    rows: torch.Tensor,  # [N, 8], see plugins/rows.py
    chunk_len: int,
) -> torch.Tensor:
    """o[T, H, V]; head h reads key head h // (H / G).

    Gated delta rule: Yang et al. 2024, arXiv 2412.06464; KDA: Kimi Linear 2025, arXiv 2510.26692. With
    g = A softplus(a + dt_bias) and beta = sigmoid(b):
        h_t = exp(g_t) h_{t-1} + k_t (x) u_t,  u_t = beta_t (v_t - (exp(g_t) h_{t-1}).k_t),  o_t = h_t.q_t
    In chunks, with the edge state S0 and G = cumsum(g), a scalar per head or per channel:
        A_ts = beta_t sum_c k_tc k_sc exp(G_tc - G_sc) for s < t;   T = (I + A)^-1
        U    = T beta (v - (k exp(G)).S0)
        o_t  = (q_t exp(G_t)).S0 + sum_{s <= t} sum_c q_tc k_sc exp(G_tc - G_sc) U_s
        S1   = exp(G_C) S0 + sum_s (k_s exp(G_C - G_s)) (x) U_s
    Row t of T depends on rows <= t of A only.
    """
    g, beta = torch.zeros(a.shape, dtype=g_records.dtype), torch.zeros(b.shape, dtype=beta_records.dtype)
    for t in range(len(a)):
        g[t] = A[:, None] * F.softplus(a[t].to(g.dtype) + dt_bias)
        beta[t] = torch.sigmoid(b[t].to(beta.dtype))
    records, new = (k_records, v_records, g_records, beta_records), (k, v, g, beta)
    ring_len, per_group = k_records.shape[1], v.shape[1] // k.shape[1]
    o = torch.zeros_like(v)
    for row in live_rows(rows, chunk_len):
        slot = row.slot
        h = torch.zeros_like(state[slot]) if row.committed == 0 else state[slot].clone()
        at_edge = h
        for position in range(row.edge, row.end):
            token = row.first + position - row.committed
            if position < row.committed:
                k_t, v_t, g_t, beta_t = (ring[slot, position % ring_len] for ring in records)
            else:
                k_t, v_t, g_t, beta_t = (tensor[token] for tensor in new)
            k_t = k_t.repeat_interleave(per_group, 0)
            h = h * torch.exp(g_t)[:, :, None]
            u_t = beta_t[:, None] * (v_t - (h * k_t[:, :, None]).sum(1))
            h = h + k_t[:, :, None] * u_t[:, None, :]
            if position >= row.committed:
                o[token] = (h * q[token].repeat_interleave(per_group, 0)[:, :, None]).sum(1)
            if position + 1 == row.new_edge:
                at_edge = h
            if row.snapshot_slot > 0 and position + 1 == row.snapshot_edge:
                state[row.snapshot_slot] = h
        state[slot] = at_edge
        for position in range(max(row.committed, row.new_edge), row.end):
            for ring, tensor in zip(records, new, strict=True):
                ring[slot, position % ring_len] = tensor[row.first + position - row.committed]
    return o
