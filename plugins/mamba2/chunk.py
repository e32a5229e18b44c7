"""Mamba2's recurrence in tiles of C tokens on the absolute grid: one arithmetic for prompts and for decode.

A tile with edge state S0 and a = cumsum(dt * A):
    y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
    S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
Bits do not depend on how a sequence is split: a tile's shapes are fixed, its sums run over all C places, and
only operations are used whose results do not depend on a number's neighbours: bmm, exp, cumsum, and single
multiplications and additions (tests/plugins/test_torch_bits.py). sigmoid, silu and softplus do depend.
"""

import torch

from hemiola.plugins.bits import add_bmm, bmm, causal, span_sums
from hemiola.plugins.grid import Tiles, plan_tiles


def mamba2(
    x: torch.Tensor,  # [T, H, P]
    B: torch.Tensor,  # [T, G, D]
    C: torch.Tensor,  # [T, G, D]
    dt: torch.Tensor,  # [T, H]
    A: torch.Tensor,  # [H]
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
    """y[T, H, P], the D * x term included; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    (num_tokens, heads, width), groups = x.shape, B.shape[1]
    tiles = plan_tiles(rows, num_tokens, chunk_len, x_records.shape[1], groups, heads, groups)
    if tiles is None:
        return torch.zeros_like(x)
    exact = state.dtype  # fp32, or fp64 in tests
    dtype, x = x.dtype, x.to(x_records.dtype)
    x_tile = tiles.take(x_records, x).to(exact)  # [n, H, C, P]
    B_tile = tiles.take(B_records, B.to(B_records.dtype)).to(exact)  # [n, G, C, D]
    C_tile = tiles.take_queries(C).to(exact)
    dt_tile = tiles.take(dt_records, dt.to(dt_records.dtype)).to(exact)  # [n, H, C]

    log_decay = dt_tile * A.to(exact).unsqueeze(1)
    total = log_decay.cumsum(2)
    weight = span_sums(log_decay).exp_()  # [n, H, C, C]
    weight.mul_(dt_tile.unsqueeze(2))
    across = _scan(tiles, state, x_tile, B_tile, C_tile, weight.select(2, -1), total.select(2, -1))
    scores = bmm(C_tile.flatten(0, 1), B_tile.flatten(0, 1).mT).mul_(causal(chunk_len, exact))
    weight.view(-1, heads // groups, chunk_len, chunk_len).mul_(scores.unsqueeze(1))
    within = bmm(weight.flatten(0, 1), x_tile.flatten(0, 1))

    reach = tiles.select(total.unsqueeze(3), heads).exp_()
    y = tiles.select(across, groups).view(-1, heads, width) * reach
    y.add_(tiles.select(within, heads)).add_(tiles.drop_padding(x).to(exact) * D.to(exact).unsqueeze(1))
    return tiles.scatter(y).to(dtype)


def _scan(
    tiles: Tiles,
    state: torch.Tensor,
    x: torch.Tensor,  # [n, H, C, P]
    B: torch.Tensor,  # [n, G, C, D]
    C: torch.Tensor,  # [n, G, C, D]
    weight: torch.Tensor,  # [n, H, C] what of a token reaches the tile's end
    total: torch.Tensor,  # [n, H]
) -> torch.Tensor:
    """C_t.S0 of every tile [n G, C, H / G * P]; states move from edge to edge and are stored."""
    (_, heads, chunk_len, width), (groups, depth) = x.shape, (B.shape[1], B.shape[3])
    queries = C.flatten(0, 1)
    across = queries.new_empty(queries.shape[0], chunk_len, heads // groups * width)
    inputs = keys = decay = queries  # without folds nobody reads them
    if tiles.folded is not None:
        gain = weight.index_select(0, tiles.folded).unsqueeze(3)
        inputs = (x.index_select(0, tiles.folded) * gain).flatten(0, 1).mT
        keys = B.index_select(0, tiles.folded).repeat_interleave(heads // groups, 1).flatten(0, 1)
        decay = total.index_select(0, tiles.folded).exp_().view(-1, 1, 1)

    def visit(tile: int, states: torch.Tensor) -> None:
        start, num = tile * groups, states.shape[0] * groups
        read = states.view(num, -1, depth).mT
        bmm(queries.narrow(0, start, num), read, out=across.narrow(0, start, num))

    def move(_: int, fold: int, states: torch.Tensor) -> None:
        start, num = fold * heads, states.shape[0] * heads
        moved = states.flatten(0, 1).mul_(decay.narrow(0, start, num))
        add_bmm(moved, inputs.narrow(0, start, num), keys.narrow(0, start, num))

    tiles.scan(state, visit, move)
    return across
