"""The gated delta rule in tiles of C tokens on the absolute grid: one arithmetic for prompts and for decode.

A tile with edge state S0 and G = cumsum(g), a scalar per head (gated delta rule) or per channel (KDA):
    A_ts = beta_t sum_c k_tc k_sc exp(G_tc - G_sc) for s < t;   T = (I + A)^-1
    U    = T beta (v - (k exp(G)).S0)
    o_t  = (q_t exp(G_t)).S0 + sum_{s <= t} sum_c q_tc k_sc exp(G_tc - G_sc) U_s
    S1   = exp(G_C) S0 + sum_s (k_s exp(G_C - G_s)) (x) U_s
Row t of T depends on rows <= t of A only. Bits do not depend on how a sequence is split: see mamba2/chunk.py.
"""

from typing import NamedTuple

import torch

from hemiola.plugins.bits import add_bmm, bmm, causal, inverse, span_sums, strictly_causal, subtract_bmm
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
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """o[T, H, V]; see reference.py."""
    if chunk_len & (chunk_len - 1):
        raise ValueError(f"delta: chunk_len is {chunk_len}, expected a power of two")
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    (num_tokens, groups, _), heads = k.shape, v.shape[1]
    tiles = plan_tiles(rows, num_tokens, chunk_len, k_records.shape[1], groups, heads, heads)
    if tiles is None:
        return torch.zeros_like(v)
    exact = state.dtype  # fp32, or fp64 in tests
    q_tile = tiles.take_queries(q).to(exact)  # [n, H, C, K]
    k_tile = tiles.take(k_records, k.to(k_records.dtype)).to(exact)  # [n, G, C, K]
    v_tile = tiles.take(v_records, v.to(v_records.dtype)).to(exact)  # [n, H, C, V]
    g_tile = tiles.take(g_records, g.to(g_records.dtype)).to(exact)  # [n, H, C, J]
    beta_tile = tiles.take(beta_records, beta.to(beta_records.dtype)).to(exact)
    beta_tile = beta_tile.view(-1, chunk_len)  # [n H, C]

    if g.shape[2] == 1:
        spans = _head_decay(q_tile, k_tile, g_tile.view(-1, heads, chunk_len))
    else:
        spans = _channel_decay(q_tile, k_tile, g_tile)
    solve = inverse(spans.keys.mul_(beta_tile.unsqueeze(2))) * beta_tile.unsqueeze(1)
    updates = bmm(solve, v_tile.flatten(0, 1))
    if g.shape[2] == 1:  # the decay of a whole vector moves into the matrices beside it
        solve = solve.mul_(spans.reach.view(-1, 1, chunk_len))
        by_group = solve.view(-1, heads // groups * chunk_len, chunk_len)
        removal = bmm(by_group, k_tile.flatten(0, 1)).view(-1, chunk_len, k.shape[2])
        across = tiles.select(_scan(tiles, state, k_tile, spans, updates, removal, q_tile), heads)
        across *= tiles.select(spans.reach, heads)
    else:
        reaching = k_tile.unsqueeze(2) * spans.reach.view(-1, groups, heads // groups, chunk_len, k.shape[2])
        removal = bmm(solve, reaching.view(-1, chunk_len, k.shape[2]))
        q_tile = q_tile * spans.reach
        across = tiles.select(_scan(tiles, state, k_tile, spans, updates, removal, q_tile), heads)
    within = bmm(spans.queries, updates)
    return tiles.scatter(across.add_(tiles.select(within, heads))).to(v.dtype)


class _Spans(NamedTuple):
    """Keys and queries met with keys under the decay in between, and decays to and from the tile's ends."""

    keys: torch.Tensor  # [n H, C, C] k_t.k_s, decayed from s to t, for s < t
    queries: torch.Tensor  # [n H, C, C] q_t.k_s, decayed from s to t, for s <= t
    reach: torch.Tensor  # [n, H, C, J] from the edge to t
    remain: torch.Tensor  # [n, H, C, J] from s to the tile's end
    total: torch.Tensor  # [n, H, J] log decay of the tile


def _head_decay(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> _Spans:
    """One decay per head: one product of keys for all heads of a group, times exp(G_t - G_s)."""
    (_, groups, chunk_len, depth), heads = k.shape, g.shape[1]
    keys = k.flatten(0, 1)
    decay = span_sums(g).exp_()  # [n, H, C, C]
    by_group = decay.view(-1, heads // groups, chunk_len, chunk_len)
    key_pairs = bmm(keys, keys.mT).mul_(strictly_causal(chunk_len, g.dtype)).unsqueeze(1) * by_group
    query_pairs = bmm(q.view(-1, heads // groups * chunk_len, depth), keys.mT)
    query_pairs = query_pairs.view(-1, chunk_len, chunk_len).mul_(causal(chunk_len, g.dtype))
    query_pairs.mul_(decay.flatten(0, 1))
    total = g.cumsum(2).unsqueeze(3)
    return _Spans(
        keys=key_pairs.flatten(0, 1),
        queries=query_pairs,
        reach=total.exp(),
        remain=decay.select(2, -1).unsqueeze(3),
        total=total.select(2, -1),
    )


def _channel_decay(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> _Spans:
    """A decay per channel: s and t meet in the smallest aligned block that has them in different halves.

    Their decay is the product of the decays from s to the block's middle and from there to t, themselves
    products of numbers <= 1: nothing overflows, however strong the decay.
    """
    (num_tiles, groups, chunk_len, depth), heads = k.shape, g.shape[1]
    shape = (num_tiles, groups, heads // groups)
    k = k.unsqueeze(2)
    # [n, G, H / G, C, 2, K]
    both = torch.stack([k.expand(*shape, chunk_len, depth), q.view(*shape, chunk_len, depth)], 4)
    reach = g.exp().view(*shape, chunk_len, depth)  # from the start of t's block to t, t's own decay included
    remain = torch.ones_like(reach)  # from s to the end of its block
    pairs = k.new_zeros(*shape, chunk_len, 2, chunk_len)
    own = bmm(both.view(-1, 2, depth), k.expand(reach.shape).reshape(-1, depth, 1))
    pairs.diagonal(dim1=3, dim2=5).copy_(own.view(*shape, chunk_len, 2).mT)
    half = 1
    while half < chunk_len:
        num = chunk_len // (2 * half)
        left_reach, right_reach = reach.view(*shape, num, 2, half, depth).unbind(4)
        left_remain = remain.view(*shape, num, 2, half, depth).select(4, 0)
        late = both.view(*shape, num, 2, half, 2, depth).select(4, 1) * right_reach.unsqueeze(5)
        early = k.view(num_tiles, groups, 1, num, 2, half, depth).select(4, 0) * left_remain
        block = bmm(late.view(-1, 2 * half, depth), early.view(-1, half, depth).mT)
        place = pairs.view(*shape, num, 2, half, 2, num, 2, half).select(8, 0).select(4, 1)
        place.diagonal(dim1=3, dim2=6).copy_(block.view(*shape, num, half, 2, half).movedim(3, -1))
        left_remain *= right_reach.narrow(4, half - 1, 1)
        right_reach *= left_reach.narrow(4, half - 1, 1)
        half *= 2
    key_pairs, query_pairs = pairs.view(-1, chunk_len, 2, chunk_len).unbind(2)
    tile = (num_tiles, heads, chunk_len, depth)
    return _Spans(
        keys=key_pairs * strictly_causal(chunk_len, g.dtype),
        queries=query_pairs,
        reach=reach.view(tile),
        remain=remain.view(tile),
        total=g.sum(2),
    )


def _scan(
    tiles: Tiles,
    state: torch.Tensor,
    k: torch.Tensor,  # [n, G, C, K]
    spans: _Spans,
    updates: torch.Tensor,  # [n H, C, V] T beta v, becomes U
    removal: torch.Tensor,  # [n H, C, K] T beta k exp(G)
    queries: torch.Tensor,  # [n, H, C, K]
) -> torch.Tensor:
    """q_t.S0 of every tile [n, H, C, V]; states move from edge to edge, are stored; `updates` turns to U."""
    num_tiles, heads, chunk_len, _ = queries.shape
    queries = queries.flatten(0, 1)
    across = torch.empty_like(updates)
    keys = decay = queries  # without folds nobody reads them
    if tiles.folded is not None:
        keys = k.index_select(0, tiles.folded).repeat_interleave(heads // k.shape[1], 1)
        keys = keys.mul_(spans.remain.index_select(0, tiles.folded)).flatten(0, 1).mT
        decay = spans.total.index_select(0, tiles.folded).exp_().flatten(0, 1).unsqueeze(2)

    def visit(tile: int, states: torch.Tensor) -> None:
        start, num = tile * heads, states.shape[0] * heads
        read = states.flatten(0, 1)
        subtract_bmm(updates.narrow(0, start, num), removal.narrow(0, start, num), read)
        bmm(queries.narrow(0, start, num), read, out=across.narrow(0, start, num))

    def move(tile: int, fold: int, states: torch.Tensor) -> None:
        start, num = fold * heads, states.shape[0] * heads
        moved = states.flatten(0, 1).mul_(decay.narrow(0, start, num))
        add_bmm(moved, keys.narrow(0, start, num), updates.narrow(0, tile * heads, num))

    tiles.scan(state, visit, move)
    return across.view(num_tiles, heads, chunk_len, -1)
