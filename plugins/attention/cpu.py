"""Paged attention in few torch calls: SDPA for `fast`, products of fixed shape for `exact`."""

import torch
import torch.nn.functional as F

from hemiola.plugins.attention import exact as fixed
from hemiola.plugins.attention.plan import Form, Group, plan_step

SHORT_LEN = 32  # a row of up to this many tokens attends in one SDPA call, with others where they are small
TILE_LEN = 128  # tokens of a longer row per SDPA call; a tile skips the keys that lie behind all its tokens


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
    first: int,
) -> torch.Tensor:  # [T, H, D]
    """See reference.py. Tokens must be finite; places that no token has reached may hold anything."""
    num_tokens, num_heads, head_dim = q.shape
    num_groups = k.shape[1]
    num_copies = num_heads // num_groups
    wide = torch.promote_types(q.dtype, torch.float32)
    token_bytes = 2 * num_groups * head_dim * wide.itemsize
    if exact:
        form = Form(fixed.tile_len(num_copies), False, fixed.SPLIT_LEN, num_copies, token_bytes, first)
    else:
        form = Form(SHORT_LEN, True, 1, num_copies, token_bytes, first)
    rows = (x.numpy().tobytes() for x in (cu_tokens, positions, page_table))
    plan = plan_step(*rows, k_pages.shape[1], form)
    for pages, new in ((k_pages, k), (v_pages, v)):
        pages.view(-1, num_groups, head_dim).index_copy_(0, plan.slots, new.to(pages.dtype))
    queries = q.to(wide).view(num_tokens, num_groups, num_copies, head_dim)
    out = torch.empty_like(queries)
    for group in plan.groups:
        keys, values = read(k_pages, group, wide), read(v_pages, group, wide)
        if exact:
            fixed.attend(queries, keys, values, group, positions.numpy(), scale, first, out)
        elif group.rows[0].num_tokens <= SHORT_LEN:
            attend_stacked(queries, keys, values, group, scale, out)
        else:
            attend_tiled(queries, keys, values, group, positions, scale, first, out)
    return out.view(q.shape).to(q.dtype)


def read(pages: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """[n, S, G, D]: the keys or values of n rows, zero where a row has none.

    Nothing but a row's own tokens gets in: the rest of its pages may be poison or another request's.
    """
    if group.first_page >= 0:
        end = group.first_page + group.page_ids.numel()
        return pages[group.first_page : end].flatten(0, 1)[None, : group.room].to(dtype)
    copy = pages.index_select(0, group.page_ids).to(dtype)
    if group.empty.numel():
        copy.view(-1, *pages.shape[2:]).index_fill_(0, group.empty, 0)
    return copy.view(len(group.rows), -1, *pages.shape[2:])[:, : group.room]


def attend_stacked(
    queries: torch.Tensor,  # [T, G, H/G, D]
    keys: torch.Tensor,  # [n, S, G, D]
    values: torch.Tensor,
    group: Group,
    scale: float,
    out: torch.Tensor,  # [T, G, H/G, D], written
) -> None:
    """One SDPA call: all tokens and query heads of a row and key head stand as the queries of one head."""
    num_groups, num_copies, head_dim = queries.shape[1:]
    num_rows, num_tokens = len(group.rows), group.rows[0].num_tokens
    q = queries.index_select(0, group.tokens).view(num_rows, num_tokens, num_groups, num_copies, head_dim)
    q = q.transpose(1, 2).flatten(2, 3)  # [n, G, tokens * H/G, D]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    bias = (
        None if group.bias is None else group.bias.to(q.dtype)
    )  # once per step, not per layer as a mask of bools
    o = F.scaled_dot_product_attention(q, keys, values, bias, scale=scale)
    o = o.view(num_rows, num_groups, num_tokens, num_copies, head_dim).transpose(1, 2).flatten(0, 1)
    out.index_copy_(0, group.tokens, o)


def attend_tiled(
    queries: torch.Tensor,  # [T, G, H/G, D]
    keys: torch.Tensor,  # [1, S, G, D]
    values: torch.Tensor,
    group: Group,  # one row
    positions: torch.Tensor,  # [T]
    scale: float,
    first: int,
    out: torch.Tensor,  # [T, G, H/G, D], written
) -> None:
    """One SDPA call per TILE_LEN tokens of the row, over the keys that the tile sees."""
    row = group.rows[0]
    keys, values = (x.permute(2, 0, 1, 3) for x in (keys, values))  # [G, 1, S, D]: shared by the query heads
    end = row.start + row.num_tokens
    for start in range(row.start, end, TILE_LEN):
        tile = slice(start, min(start + TILE_LEN, end))
        last = positions[tile, None]
        num_keys = int(last.max()) + 1
        places = torch.arange(num_keys, dtype=torch.int32)
        visible = (places <= last) & (places >= first)
        q = queries[tile].permute(1, 2, 0, 3)  # [G, H/G, tokens, D]
        k, v = (x[:, :, :num_keys].expand(-1, q.shape[1], -1, -1) for x in (keys, values))
        o = F.scaled_dot_product_attention(q, k, v, visible, scale=scale)
        out[tile] = o.permute(2, 0, 1, 3)
