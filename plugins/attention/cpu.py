"""Paged attention in few torch calls: SDPA for `fast`, products of fixed shape for `exact`."""

import numpy as np
import torch
import torch.nn.functional as F

from hemiola.plugins.attention import exact as fixed
from hemiola.plugins.attention.pages import Gather, Row, group_rows, list_rows, token_slots, write

MAX_SHORT = 8  # rows of up to this many tokens share SDPA calls
QUERY_TILE = 128  # tokens of a long row per SDPA call; a tile skips the keys that lie behind all its tokens


def attention(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, G, D]
    v: torch.Tensor,  # [T, G, D]
    k_pages: torch.Tensor,  # [pages, page_len, G, D], written
    v_pages: torch.Tensor,  # [pages, page_len, G, D], written
    page_table: torch.Tensor,  # [N, W] int32
    cu_tokens: torch.Tensor,  # [N + 1] int32
    positions: torch.Tensor,  # [T] int32
    scale: float,
    exact: bool,
) -> torch.Tensor:  # [T, H, D]
    """See reference.py. Inputs and the used places of pages must be finite; unused places may hold anything."""
    table, cu, places = page_table.numpy(), cu_tokens.tolist(), positions.numpy()
    page_len, num_groups = k_pages.shape[1:3]
    slots = token_slots(table, cu, places, page_len)
    write(k_pages, slots, k)
    write(v_pages, slots, v)

    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=wide)
    # query heads in their key heads' groups: [T, G, H/G, D]
    queries, results = (x.unflatten(1, (num_groups, -1)) for x in (q.to(wide) * scale, out))
    rows = list_rows(cu, places)
    token_bytes = 2 * wide.itemsize * k[0].numel()
    if exact:
        limit = fixed.tile_len(q.shape[1] // num_groups)
    else:
        limit = MAX_SHORT
    groups = group_rows([row for row in rows if row.num_tokens <= limit], token_bytes, same_tokens=not exact)
    groups += [[row] for row in rows if row.num_tokens > limit]
    for group in groups:
        gather = Gather(group, table, page_len, fixed.SPLIT_LEN if exact else 1)
        keys, values = gather.copy(k_pages, wide), gather.copy(v_pages, wide)
        if exact:
            fixed.attend(queries, keys, values, group, places, results)
        elif group[0].num_tokens <= MAX_SHORT:
            attend_short(queries, keys, values, group, places, results)
        else:
            attend_long(queries, keys, values, group[0], places, results)
    return out.to(q.dtype)


def attend_short(
    queries: torch.Tensor,  # [T, G, H/G, D], scaled
    keys: torch.Tensor,  # [n, S, G, D]
    values: torch.Tensor,
    group: list[Row],  # n rows of the same number of tokens
    positions: np.ndarray,
    results: torch.Tensor,  # [T, G, H/G, D], written
) -> None:
    """One SDPA call: a key head's query heads and tokens stand as queries of one head."""
    num_rows, num_tokens = len(group), group[0].num_tokens
    index = np.array([row.start for row in group])[:, None] + np.arange(num_tokens)
    visible = np.arange(keys.shape[1]) <= positions[index][:, :, None]  # [n, tokens, S]
    mask = None
    if not visible.all():
        mask = torch.from_numpy(visible).repeat_interleave(queries.shape[2], 1).unsqueeze(1)
    tokens = torch.from_numpy(index.ravel())
    q = queries.index_select(0, tokens).unflatten(0, (num_rows, num_tokens))
    q = q.transpose(1, 2).flatten(2, 3)  # [n, G, tokens * H/G, D]
    o = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=1.0)
    o = o.unflatten(2, (num_tokens, -1)).transpose(1, 2).flatten(0, 1)
    results.index_copy_(0, tokens, o)


def attend_long(
    queries: torch.Tensor,  # [T, G, H/G, D], scaled
    keys: torch.Tensor,  # [1, S, G, D]
    values: torch.Tensor,
    row: Row,
    positions: np.ndarray,
    results: torch.Tensor,  # [T, G, H/G, D], written
) -> None:
    """One SDPA call per QUERY_TILE tokens, over the keys that the tile sees."""
    keys, values = keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3)  # [G, 1, S, D]
    num_copies = queries.shape[2]
    for start in range(row.start, row.start + row.num_tokens, QUERY_TILE):
        stop = min(start + QUERY_TILE, row.start + row.num_tokens)
        last = positions[start:stop, None]
        num_keys = int(last.max()) + 1
        mask = torch.from_numpy(np.arange(num_keys) <= last)
        tile = queries[start:stop].permute(1, 2, 0, 3)  # [G, H/G, tokens, D]
        o = F.scaled_dot_product_attention(
            tile,
            keys[:, :, :num_keys].expand(-1, num_copies, -1, -1),
            values[:, :, :num_keys].expand(-1, num_copies, -1, -1),
            mask,
            scale=1.0,
        )
        results[start:stop] = o.permute(2, 0, 1, 3)
