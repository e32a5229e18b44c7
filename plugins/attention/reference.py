"""Causal attention over paged keys and values, one token and one head at a time."""

import torch

from hemiola.plugins.rows import RowFields
from hemiola.plugins.spec import E4M3

LARGEST = 448.0  # e4m3 number


def attention(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, G, D]
    v: torch.Tensor,  # [T, G, D]
    k_pages: torch.Tensor,  # [pages, page_len, G, D], written
    v_pages: torch.Tensor,  # [pages, page_len, G, D], written
    page_table: torch.Tensor,  # [N, W] int32: row n's tokens p stand in page page_table[n, p // page_len]
    rows: torch.Tensor,  # [N, 8], see plugins/rows.py; of which it reads first, num_tokens and slot
    positions: torch.Tensor,  # [T] int32: a token's place in its sequence
    scale: float,
    first: int,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:  # [T, H, D]
    """Writes every token's k and v to its page, then o = softmax(scale q.k) v over its row's tokens up to it,
    from the place `first` on (an MTP head has no entry at place 0).

    In fp32 (float64 for float64) on what the pages hold after their rounding: k / k_scale and v / v_scale.
    Query head h reads key head h // (H / G) (Ainslie et al. 2023, arXiv 2305.13245). Padding comes out as
    zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    page_len = k_pages.shape[1]
    heads_per_group = q.shape[1] // k.shape[1]
    fields = [RowFields(*line, end=0, new_edge=0) for line in rows.tolist()]
    owners = {
        t: n for n, row in enumerate(fields) if row.slot for t in range(row.first, row.first + row.num_tokens)
    }

    for t, row in owners.items():
        page = page_table[row, positions[t] // page_len]
        k_pages[page, positions[t] % page_len] = _kept(k[t], k_scale, k_pages.dtype)
        v_pages[page, positions[t] % page_len] = _kept(v[t], v_scale, v_pages.dtype)

    o = torch.zeros(q.shape, dtype=wide)
    for t, row in owners.items():
        num_keys = int(positions[t]) + 1
        pages = page_table[row, : -(-num_keys // page_len)]
        keys = k_pages[pages].flatten(0, 1)[first:num_keys].to(wide) * k_scale  # [keys, G, D]
        values = v_pages[pages].flatten(0, 1)[first:num_keys].to(wide) * v_scale
        for h in range(q.shape[1]):
            g = h // heads_per_group
            probability = torch.softmax(keys[:, g] @ q[t, h].to(wide) * scale, 0)
            o[t, h] = probability @ values[:, g]
    return o.to(q.dtype)


def _kept(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """As a page has it. What is beyond e4m3 becomes its largest number; torch's cast may make NaN of it."""
    units = x.to(torch.promote_types(x.dtype, torch.float32)) / scale
    return (units.clamp(-LARGEST, LARGEST) if dtype is E4M3 else units).to(dtype)
