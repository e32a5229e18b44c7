"""Attention in products of fixed shape: a token's bits depend only on its own sequence up to itself.

A query tile is a fixed number of tokens of one row with all query heads of one key head; keys come in splits
of SPLIT_LEN at absolute positions. So every GEMM of a model has the same shape. The maximum over all visible
keys is found first (a maximum does not round); then each split adds its exponentials to the sum and to the
output, in position order. A key that a token may not see adds exact zeros.
"""

import numpy as np
import torch

from hemiola.plugins.attention.plan import Group, Row

SPLIT_LEN = 64
MIN_TILE_ROWS = 16  # of a GEMM; fewer waste less in a decode step, more run faster in a prefill
MAX_TILES = 64  # query tiles per pass, so that their scores stay in cache


def tile_len(num_copies: int) -> int:
    """Tokens in a query tile, when `num_copies` query heads share a key head."""
    return -(-MIN_TILE_ROWS // num_copies)


def attend(
    queries: torch.Tensor,  # [T, G, H/G, D]
    keys: torch.Tensor,  # [n, S, G, D], S a multiple of SPLIT_LEN
    values: torch.Tensor,
    group: Group,  # one row of any length, or n rows of at most one tile each
    positions: np.ndarray,
    scale: float,
    first: int,
    out: torch.Tensor,  # [T, G, H/G, D], written
) -> None:
    """Cut rows into query tiles and attend them all."""
    num_groups, num_copies = queries.shape[1:3]
    tokens = np.concatenate([tile_tokens(row, positions, tile_len(num_copies)) for row in group.rows])
    last = positions[tokens].repeat(num_copies, axis=1)  # [tiles, M]
    index = torch.from_numpy(tokens.ravel())
    q = queries.index_select(0, index).unflatten(0, tokens.shape)  # [tiles, tile_len, G, H/G, D]
    q = q.transpose(1, 2).flatten(2, 3) * scale  # [tiles, G, M, D]
    keys, values = (x.transpose(1, 2).contiguous() for x in (keys, values))  # [n, G, S, D]
    if len(tokens) == len(group.rows):
        flat_q, flat_keys, flat_values = (x.flatten(0, 1) for x in (q, keys, values))
        o = attend_tiles(flat_q, flat_keys, flat_values, last.repeat(num_groups, axis=0), first).view(q.shape)
    else:
        o = torch.empty_like(q)
        for g in range(num_groups):
            for start in range(0, len(tokens), MAX_TILES):
                part = slice(start, start + MAX_TILES)
                o[part, g] = attend_tiles(
                    q[part, g].contiguous(), keys[:, g], values[:, g], last[part], first
                )
    o = o.unflatten(2, (-1, num_copies)).transpose(1, 2).flatten(0, 1)
    out.index_copy_(0, index, o)  # a tile's padding writes the same bits to the same token


def tile_tokens(row: Row, positions: np.ndarray, length: int) -> np.ndarray:
    """[tiles, length]: the row's tokens, highest position first, filled up with the last of them."""
    order = row.start + np.argsort(-positions[row.start : row.start + row.num_tokens], kind="stable")
    num_padding = -row.num_tokens % length
    return np.concatenate([order, np.repeat(order[-1:], num_padding)]).reshape(-1, length)


def attend_tiles(
    q: torch.Tensor,  # [B, M, D]
    keys: torch.Tensor,  # [B, S, D], or [1, S, D]: shared
    values: torch.Tensor,
    last: np.ndarray,  # [B, M]: the last key that a query sees; tiles with more keys come first
    first: int,  # the first key that any query sees
) -> torch.Tensor:  # [B, M, D]
    """Softmax attention over splits of keys, each of them with the tiles that see any of it."""
    num_splits = last.max(axis=1) // SPLIT_LEN + 1
    highest = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    scores = []
    for split in range(num_splits[0]):
        num_tiles = int((num_splits > split).sum())
        start = split * SPLIT_LEN
        part = keys[:num_tiles, start : start + SPLIT_LEN].expand(num_tiles, -1, -1)
        score = torch.bmm(q[:num_tiles], part.transpose(1, 2))
        if start < first or last[:num_tiles].min() < start + SPLIT_LEN - 1:
            place = np.arange(start, start + SPLIT_LEN)
            hidden = (place > last[:num_tiles, :, None]) | (place < first)
            score.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        torch.maximum(highest[:num_tiles], score.amax(2), out=highest[:num_tiles])
        scores.append(score)

    total = torch.zeros_like(highest)
    o = torch.zeros_like(q)
    for split, score in enumerate(scores):
        num_tiles = len(score)
        start = split * SPLIT_LEN
        part = values[:num_tiles, start : start + SPLIT_LEN].expand(num_tiles, -1, -1)
        weight = score.sub_(highest[:num_tiles, :, None]).exp_()
        total[:num_tiles] += weight.sum(2)
        o[:num_tiles].baddbmm_(weight, part)
    return o.div_(total.unsqueeze(2))
