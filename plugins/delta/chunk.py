"""The gated delta rule in tiles of C tokens on the absolute grid: one arithmetic for prompts and for decode.

A tile with edge state S0 and G = cumsum(g), a scalar per head (gated delta rule) or per channel (KDA):
    N_ts = -beta_t sum_c k_tc k_sc exp(G_tc - G_sc) for s < t;   T = (I - N)^-1
    U    = T beta (v - (k exp(G)).S0)
    o_t  = (q_t exp(G_t)).S0 + sum_{s <= t} sum_c q_tc k_sc exp(G_tc - G_sc) U_s
    S1   = exp(G_C) S0 + sum_s (k_s exp(G_C - G_s)) (x) U_s
Row t of T depends on rows <= t of N only. Bits do not depend on how a sequence is split: see mamba2/chunk.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from hemiola.plugins.grid import Tiles, plan_tiles


def delta(
    q: torch.Tensor,  # [T, G, K]
    k: torch.Tensor,  # [T, G, K]
    v: torch.Tensor,  # [T, H, V]
    g: torch.Tensor,  # [T, H, J]
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
    chunk_len: int,
) -> torch.Tensor:
    """o[T, H, V]; see reference.py."""
    if chunk_len & (chunk_len - 1):
        raise ValueError(f"delta: chunk_len is {chunk_len}, expected a power of two")
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot)
    (num_tokens, groups, _), heads = k.shape, v.shape[1]
    tiles = plan_tiles(rows, num_tokens, chunk_len, k_records.shape[1], (groups, heads))
    if tiles is None:
        return torch.zeros_like(v)
    exact = state.dtype  # fp32, or fp64 in tests
    gathered = []
    for ring, new in ((k_records, k), (v_records, v), (g_records, g), (beta_records, beta)):
        new = new.to(ring.dtype)
        gathered.append(tiles.gather(ring, new).to(exact))
        tiles.store(ring, new)
    k_tile, v_tile, g_tile, beta_tile = gathered  # [n, G, C, K] [n, H, C, V] [n, H, C, J] [n, H, C]
    kq = torch.cat([k_tile, tiles.gather_queries(q).to(exact)], 2)  # [n, G, 2C, K]

    decays = _scalar_decays(kq, k_tile, g_tile) if g.shape[2] == 1 else _channel_decays(kq, k_tile, g_tile)
    beta_flat = beta_tile.view(-1, chunk_len)  # [n H, C]
    solve = _inverse(decays.keys * beta_flat.unsqueeze(2)).mul_(beta_flat.unsqueeze(1))
    # [n, G, H / G, 2, C, K]: keys and queries, as they meet the edge state
    reaching = kq.view(tiles.num_tiles, groups, 1, 2, chunk_len, -1) * decays.reach.view(
        tiles.num_tiles, groups, heads // groups, 1, chunk_len, -1
    )
    reaching = reaching.view(-1, 2 * chunk_len, k.shape[2])
    updates = torch.bmm(solve, v_tile.flatten(0, 1))
    removal = torch.bmm(solve, reaching.narrow(1, 0, chunk_len))
    across = _scan(tiles, state, k_tile, decays, updates, removal, reaching.narrow(1, chunk_len, chunk_len))
    within = torch.bmm(decays.queries, updates)
    return tiles.scatter(tiles.select(across, heads).add_(tiles.select(within, heads))).to(v.dtype)


class _Decays(NamedTuple):
    keys: torch.Tensor  # [n H, C, C] -k_t.k_s, decayed from s to t, for s < t
    queries: torch.Tensor  # [n H, C, C] q_t.k_s, decayed from s to t, for s <= t
    reach: torch.Tensor  # [n, H, C, J] from the edge to t
    remain: torch.Tensor  # [n, H, C, J] from s to the tile's end
    total: torch.Tensor  # [n, H, J] log decay of the tile


def _scalar_decays(kq: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> _Decays:
    """Decay per head: one product of keys for all heads of a group, times exp(G_t - G_s)."""
    (num_tiles, groups, chunk_len, _), heads = k.shape, g.shape[1]
    total = torch.cumsum(g.view(num_tiles, heads, chunk_len), 2, dtype=torch.float64)
    decay = (total.unsqueeze(3) - total.unsqueeze(2)).clamp_(max=0).to(g.dtype).exp_()  # [n, H, C, C]
    pairs = torch.bmm(kq.flatten(0, 1), k.flatten(0, 1).mT).view(-1, 1, 2, chunk_len, chunk_len)
    pairs *= _causal(chunk_len, g.dtype)
    pairs = pairs * decay.view(num_tiles * groups, heads // groups, 1, chunk_len, chunk_len)
    keys, queries = pairs.view(-1, 2, chunk_len, chunk_len).unbind(1)
    reach = total.to(g.dtype).exp_().unsqueeze(3)
    return _Decays(keys, queries, reach, decay.select(2, -1).unsqueeze(3), total.narrow(2, -1, 1))


def _channel_decays(kq: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> _Decays:
    """Decay per channel: pairs (t, s) by the smallest aligned half-open tree block that separates them.

    exp(G_t - G_s) is the product of the decays from s to the middle of the block and from there to t: both are
    products of numbers <= 1, so nothing overflows however strong the decay.
    """
    (num_tiles, groups, chunk_len, depth), heads = k.shape, g.shape[1]
    shape = (num_tiles, groups, heads // groups)
    kq = kq.view(num_tiles, groups, 1, 2, chunk_len, depth).transpose(3, 4).contiguous()  # [n, G, 1, C, 2, K]
    k = k.unsqueeze(2)
    reach = g.exp().view(*shape, chunk_len, depth)  # from the start of t's block to t, t's own decay included
    remain = torch.ones_like(reach)  # from s to the end of its block
    pairs = k.new_zeros(*shape, chunk_len, 2, chunk_len)
    own = torch.bmm(kq.view(-1, 2, depth), k.reshape(-1, depth, 1)).view(num_tiles, groups, 1, chunk_len, 2)
    pairs.diagonal(dim1=3, dim2=5).copy_(own.transpose(3, 4))
    half = 1
    while half < chunk_len:
        num = chunk_len // (2 * half)
        split = (*shape, num, 2, half, depth)
        left_remain, right_remain = remain.view(split).unbind(4)  # [n, G, H / G, num, half, K]
        left_reach, right_reach = reach.view(split).unbind(4)
        late = kq.view(num_tiles, groups, 1, num, 2, half, 2, depth).select(4, 1) * right_reach.unsqueeze(5)
        early = k.view(num_tiles, groups, 1, num, 2, half, depth).select(4, 0) * left_remain
        block = torch.bmm(late.view(-1, 2 * half, depth), early.view(-1, half, depth).mT)
        place = pairs.view(*shape, num, 2, half, 2, num, 2, half).select(8, 0).select(4, 1)
        place.diagonal(dim1=3, dim2=6).copy_(block.view(*shape, num, half, 2, half).movedim(3, -1))
        left_remain *= right_reach.narrow(4, half - 1, 1)
        right_reach *= left_reach.narrow(4, half - 1, 1)
        half *= 2
    pairs = pairs.view(-1, chunk_len, 2, chunk_len) * _causal(chunk_len, g.dtype).transpose(0, 1)
    total = torch.cumsum(g, 2, dtype=torch.float64).select(2, -1)
    split = (num_tiles, heads, chunk_len, depth)
    return _Decays(pairs.select(2, 0), pairs.select(2, 1), reach.view(split), remain.view(split), total)


def _scan(
    tiles: Tiles,
    state: torch.Tensor,
    k: torch.Tensor,  # [n, G, C, K]
    decays: _Decays,
    updates: torch.Tensor,  # [n H, C, V] T beta v, becomes U
    removal: torch.Tensor,  # [n H, C, K] T beta k exp(G)
    queries: torch.Tensor,  # [n H, C, K] q exp(G)
) -> torch.Tensor:
    """(q_t exp(G_t)).S0 of every tile [n H, C, V]; states move from edge to edge and are stored."""
    heads, depth, width = state.shape[1:]
    across = torch.empty_like(updates)
    if len(tiles.counts) > 1:
        remain = decays.remain.index_select(0, tiles.folded)
        keys = k.index_select(0, tiles.folded).repeat_interleave(heads // k.shape[1], 1)
        keys = keys.mul_(remain).flatten(0, 1).mT
        gain = decays.total.index_select(0, tiles.folded).to(k.dtype).exp_().flatten(0, 1).unsqueeze(2)
    current = tiles.start(state)
    tile = fold = 0
    for ordinal, count in enumerate(tiles.counts):
        start, num = tile * heads, count * heads
        flat = current.reshape(num, depth, width)
        solved = updates.narrow(0, start, num).baddbmm_(removal.narrow(0, start, num), flat, alpha=-1)
        torch.bmm(queries.narrow(0, start, num), flat, out=across.narrow(0, start, num))
        tiles.keep(ordinal, state, current)
        tile += count
        if ordinal + 1 < len(tiles.counts):
            rows = tiles.counts[ordinal + 1]
            start, num = fold * heads, rows * heads
            moved = flat.narrow(0, 0, num) * gain.narrow(0, start, num)
            moved.baddbmm_(keys.narrow(0, start, num), solved.narrow(0, 0, num))
            current = moved.view(rows, heads, depth, width)
            fold += rows
    return across


def _inverse(N: torch.Tensor) -> torch.Tensor:
    """(I - N)^-1 for strictly lower N [b, C, C], by blocks of 2, 4, ... C rows: row t depends on rows <= t."""
    eye, *levels = _blocks(N.shape[1], N.dtype)
    inverse = (N * levels[0]).add_(eye)
    for level in levels[1:]:
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, N * level), inverse)
    return inverse


@lru_cache(maxsize=8)
def _blocks(chunk_len: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Identity, and per level the entries that join two inverted blocks to one of twice the size."""
    place = torch.arange(chunk_len)
    masks = [torch.eye(chunk_len, dtype=dtype)]
    half = 1
    while half < chunk_len:
        same = place[:, None] // (2 * half) == place // (2 * half)
        masks.append((same & (place[:, None] // half > place // half)).to(dtype))
        half *= 2
    return masks


@lru_cache(maxsize=8)
def _causal(chunk_len: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, C, C]: minus one for s < t (keys), one for s <= t (queries)."""
    ones = torch.ones(chunk_len, chunk_len, dtype=dtype)
    return torch.stack([-ones.tril(-1), ones.tril()])
