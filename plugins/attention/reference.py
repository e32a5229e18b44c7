"""Causal attention over paged keys and values, one token and one head at a time."""

import torch


def attention(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, G, D]
    v: torch.Tensor,  # [T, G, D]
    k_pages: torch.Tensor,  # [pages, page_len, G, D], written
    v_pages: torch.Tensor,  # [pages, page_len, G, D], written
    page_table: torch.Tensor,  # [N, W] int32: row n's tokens p stand in page page_table[n, p // page_len]
    cu_tokens: torch.Tensor,  # [N + 1] int32
    positions: torch.Tensor,  # [T] int32: a token's place in its sequence
    scale: float,
    exact: bool,
    first: int,
) -> torch.Tensor:  # [T, H, D]
    """Writes every token's k and v to its page, then o = softmax(scale q.k) v over its row's tokens up to it,
    from the place `first` on (an MTP head has no entry at place 0).

    In fp32 (float64 for float64) on what the pages hold after their rounding. Query head h reads key head
    h // (H / G) (Ainslie et al. 2023, arXiv 2305.13245). `exact` changes how a kernel adds, not what.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    page_len = k_pages.shape[1]
    heads_per_group = q.shape[1] // k.shape[1]
    cu = cu_tokens.tolist()
    rows = [row for row in range(len(cu) - 1) for _ in range(cu[row], cu[row + 1])]

    for t, row in enumerate(rows):
        page = page_table[row, positions[t] // page_len]
        k_pages[page, positions[t] % page_len] = k[t].to(k_pages.dtype)
        v_pages[page, positions[t] % page_len] = v[t].to(v_pages.dtype)

    o = torch.zeros(q.shape, dtype=wide)
    for t, row in enumerate(rows):
        num_keys = int(positions[t]) + 1
        pages = page_table[row, : -(-num_keys // page_len)]
        keys = k_pages[pages].flatten(0, 1)[first:num_keys].to(wide)  # [keys, G, D]
        values = v_pages[pages].flatten(0, 1)[first:num_keys].to(wide)
        for h in range(q.shape[1]):
            g = h // heads_per_group
            probability = torch.softmax(keys[:, g] @ q[t, h].to(wide) * scale, 0)
            o[t, h] = probability @ values[:, g]
    return o.to(q.dtype)
