"""The gated delta rule, one token after the other; a decay per channel makes it KDA."""

import torch

from hemiola.plugins.grid import step_rows


def delta(
    q: torch.Tensor,  # [T, G, K] normalised and scaled
    k: torch.Tensor,  # [T, G, K] normalised
    v: torch.Tensor,  # [T, H, V]
    g: torch.Tensor,  # [T, H, J] log decay of this token; J = 1 or K
    beta: torch.Tensor,  # [T, H]
    state: torch.Tensor,  # [S, H, K, V]
    k_records: torch.Tensor,  # [S, R, G, K]
    v_records: torch.Tensor,  # [S, R, H, V]
    g_records: torch.Tensor,  # [S, R, H, J]
    beta_records: torch.Tensor,  # [S, R, H]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """o[T, H, V]; head h reads key head h // (H / G)."""
    records, new = (k_records, v_records, g_records, beta_records), (k, v, g, beta)
    ring_len, per_group = k_records.shape[1], v.shape[1] // k.shape[1]
    o = torch.zeros_like(v)
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    for row in step_rows(rows, chunk_len):
        slot = row.slot_id
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
