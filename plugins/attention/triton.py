"""Causal attention over pages on CUDA: one arithmetic for prompts and decode.

Keys stand in splits of SPLIT at absolute positions, tiles of TILE inside; a split has its own online softmax
(Milakov and Gimelshein 2018, arXiv 1805.02867), splits are joined in order. A row of few queries gives every
split to another program, its numbers are joined by `_join_splits`; others walk all splits in one program. All
queries of a key head that fit a tile share what is read. Row sums are products with ones: tl.sum would depend
on how warps share a row. Multiply-adds are never contracted.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import add_dot, dot
from hemiola.plugins.gpu.rows import CLEAR_TOKENS, clear_dead_tokens

_NOTHING = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_len"])
def _write(
    k, v, k_pages, v_pages, page_table, rows, positions, o, k_scale, v_scale, num_rows, num_tokens, table_len,
    k_len, v_len, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr, N_ROWS: tl.constexpr,
):  # fmt: skip
    # Grid: one program per 16 tokens that stores their k and v, one that clears dead tokens' outputs.
    # Tile: [16 tokens, D] of one key head after the other.
    # Traffic: k and v of live tokens once in and once out.
    block = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 1:
        clear_dead_tokens(o, rows, num_rows, num_tokens, block, G * R * D)
    else:
        token = block * CLEAR_TOKENS + tl.arange(0, CLEAR_TOKENS)
        n, d = tl.arange(0, N_ROWS), tl.arange(0, D)
        begin = tl.load(rows + n * 8, mask=n < num_rows, other=0)
        num = tl.load(rows + n * 8 + 1, mask=n < num_rows, other=0)
        slot = tl.load(rows + n * 8 + 3, mask=n < num_rows, other=0)
        mine = (
            (token[:, None] >= begin[None, :])
            & (token[:, None] < (begin + num)[None, :])
            & (slot != 0)[None, :]
        )
        row = tl.max(tl.where(mine, n[None, :], -1), 1)
        live = (row >= 0) & (token < num_tokens)
        position = tl.load(positions + token, mask=live, other=0)
        page = tl.load(page_table + row * table_len + position // L, mask=live, other=0)
        at = (page.to(tl.int64) * L + position % L) * (G * D)
        for g in range(G):
            source = token.to(tl.int64)[:, None]
            value_k = tl.load(k + source * k_len + (g * D + d)[None, :], mask=live[:, None], other=0.0)
            value_v = tl.load(v + source * v_len + (g * D + d)[None, :], mask=live[:, None], other=0.0)
            to = at[:, None] + (g * D + d)[None, :]
            tl.store(k_pages + to, _rounded(value_k, k_scale, k_pages.dtype.element_ty), mask=live[:, None])
            tl.store(v_pages + to, _rounded(value_v, v_scale, v_pages.dtype.element_ty), mask=live[:, None])


@triton.jit
def _rounded(value, scale, dtype: tl.constexpr):
    """As a page keeps it."""
    if dtype == tl.bfloat16:
        return value
    else:
        scaled = value.to(tl.float32) / tl.load(scale)
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(dtype)


@triton.jit
def _shares(
    rows, num_rows, capacity, R: tl.constexpr, N_ROWS: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr
):
    """By row: tokens, their place, splits that other programs take, where these start,
    items of a key head."""
    n = tl.arange(0, N_ROWS)
    begin = tl.load(rows + n * 8, mask=n < num_rows, other=0)
    num = tl.load(rows + n * 8 + 1, mask=n < num_rows, other=0)
    slot = tl.load(rows + n * 8 + 3, mask=n < num_rows, other=0)
    committed = tl.load(rows + n * 8 + 4, mask=n < num_rows, other=0)
    num = tl.where(slot != 0, num, 0)
    blocks = (num * R + BM - 1) // BM
    splits = tl.where(blocks == 1, (committed + num + SPLIT - 1) // SPLIT, 0)
    splits = tl.where(splits > 1, splits, 0)
    start = tl.cumsum(splits, 0) - splits
    splits = tl.where(start + splits <= capacity, splits, 0)
    return n, begin, num, committed, splits, start, tl.where(splits > 0, splits, blocks)


@triton.jit
def _of(values, n, row):
    """values[row]"""
    return tl.sum(tl.where(n == row, values, 0), 0)


@triton.jit(do_not_specialize=["first", "num_rows", "table_len", "capacity"])
def _attend(
    q, k_pages, v_pages, page_table, rows, o, partial, k_scale, v_scale, scale, first, num_rows, table_len,
    capacity, q_len, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    N_ROWS: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out items: a split of a row of few queries, or all splits of BM queries.
    # Tile: BM rows (token, head of the group) against TILE keys of one key head.
    # Traffic: keys and values once per BM queries of a row; a split's numbers once where others join them.
    n, begin, num, committed, splits, start, items = _shares(rows, num_rows, capacity, R, N_ROWS, BM, SPLIT)
    last_item = tl.cumsum(items, 0)
    if first < 0:
        first = 0
    scale = scale * tl.load(k_scale)
    unit_v = tl.load(v_scale)
    for item in range(tl.program_id(0), tl.sum(items, 0) * G, tl.num_programs(0)):
        g, i = item % G, item // G
        row = tl.sum((last_item <= i).to(tl.int32), 0)
        inside = i - _of(last_item - items, n, row)
        row_splits, row_num, row_committed = _of(splits, n, row), _of(num, n, row), _of(committed, n, row)
        row_begin = _of(begin, n, row)
        block = tl.where(row_splits > 0, 0, inside)
        m = block * BM + tl.arange(0, BM)
        d = tl.arange(0, D)
        t, head = m // R, g * R + m % R
        live, position = t < row_num, row_committed + t
        last = row_committed + tl.minimum(row_num - 1, (block * BM + BM - 1) // R)
        queries = q + row_begin.to(tl.int64) * q_len + (t[:, None] * q_len + head[:, None] * D + d[None, :])
        q_m = tl.load(queries, mask=live[:, None], other=0.0)
        table = page_table + row * table_len
        if row_splits > 0:
            best, weight, total = _split(
                q_m, k_pages + g * D, v_pages + g * D, table, inside, last, position, first, scale,
                G, D, L, BM, SPLIT, TILE,
            )  # fmt: skip
            at = ((_of(start, n, row) + inside) * G + g) * BM
            numbers = partial + at.to(tl.int64) * D + (tl.arange(0, BM)[:, None] * D + d[None, :])
            tl.store(numbers, total, mask=live[:, None])
            sums = partial + (capacity * G * BM).to(tl.int64) * D + at * 2 + tl.arange(0, BM) * 2
            tl.store(sums, best, mask=live)
            tl.store(sums + 1, weight, mask=live)
        else:
            best = tl.full((BM,), _NOTHING, tl.float32)
            weight, total = tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
            for split in range(0, last // SPLIT + 1):
                b, w, s = _split(
                    q_m, k_pages + g * D, v_pages + g * D, table, split, last, position, first, scale,
                    G, D, L, BM, SPLIT, TILE,
                )  # fmt: skip
                best, weight, total = _joined(best, weight, total, b, w, s)
            out = _finished(best, weight, total, unit_v).to(o.dtype.element_ty)
            to = o + row_begin.to(tl.int64) * (G * R * D) + ((t * (G * R) + head)[:, None] * D + d[None, :])
            tl.store(to, out, mask=live[:, None])


@triton.jit
def _split(
    q_m, k_pages, v_pages, table, split, last, position, first, scale, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The online softmax over one split: largest score, sum of weights, weighted sum of values."""
    best = tl.full((BM,), _NOTHING, tl.float32)
    weight, total = tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    d = tl.arange(0, D)
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(tl.bfloat16)
    for low in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, last + 1), TILE):
        place = low + tl.arange(0, TILE)
        real = (place >= first) & (place <= last)  # memory that nobody wrote may hold NaN
        page = tl.load(table + place // L, mask=real, other=0).to(tl.int64)
        at = ((page * L + place % L) * (G * D))[:, None] + d[None, :]
        k_n = tl.load(k_pages + at, mask=real[:, None], other=0.0).to(tl.bfloat16)
        v_n = tl.load(v_pages + at, mask=real[:, None], other=0.0).to(tl.bfloat16)
        seen = (place[None, :] <= position[:, None]) & (place >= first)[None, :]
        score = tl.where(seen, dot(q_m, tl.trans(k_n)) * scale, _NOTHING)
        new_best = tl.maximum(best, tl.max(score, 1))
        faded = tl.exp2(best - new_best)
        share = tl.exp2(score - new_best[:, None]).to(tl.bfloat16)
        weight = weight * faded + tl.max(dot(share, ones), 1)
        total = add_dot(total * faded[:, None], share, v_n)
        best = new_best
    return best, weight, total


@triton.jit
def _joined(best, weight, total, other_best, other_weight, other_total):
    """Two splits as one; a split without a key that the query sees changes nothing."""
    new_best = tl.maximum(best, other_best)
    mine, other = tl.exp2(best - new_best), tl.exp2(other_best - new_best)
    return (
        new_best,
        weight * mine + other_weight * other,
        total * mine[:, None] + other_total * other[:, None],
    )


@triton.jit
def _finished(best, weight, total, unit_v):
    """Zeros for a query that sees no key."""
    return tl.where((best > _NOTHING)[:, None], total / weight[:, None] * unit_v, 0.0)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _join_splits(
    rows, o, partial, v_scale, num_rows, capacity, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, N_ROWS: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Grid: one program per token and key head; those whose row walked its splits itself have nothing to do.
    # Tile: [heads of the group, D] of one split after the other.
    # Traffic: every number of a split once in, outputs once out.
    token, g = tl.program_id(0) // G, tl.program_id(0) % G
    n, begin, num, _, splits, start, _ = _shares(rows, num_rows, capacity, R, N_ROWS, BM, SPLIT)
    row = tl.max(tl.where((token >= begin) & (token < begin + num) & (splits > 0), n, -1), 0)
    if row >= 0:
        HEADS: tl.constexpr = triton.next_power_of_2(R)
        head, d = tl.arange(0, HEADS), tl.arange(0, D)
        m, mine = (token - _of(begin, n, row)) * R + head, head < R
        best = tl.full((HEADS,), _NOTHING, tl.float32)
        weight, total = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, D), tl.float32)
        for split in range(_of(splits, n, row)):
            at = ((_of(start, n, row) + split) * G + g) * BM
            sums = partial + (capacity * G * BM).to(tl.int64) * D + at * 2 + m * 2
            b, w = tl.load(sums, mask=mine, other=_NOTHING), tl.load(sums + 1, mask=mine, other=0.0)
            numbers = partial + at.to(tl.int64) * D + (m[:, None] * D + d[None, :])
            s = tl.load(numbers, mask=mine[:, None], other=0.0)
            best, weight, total = _joined(best, weight, total, b, w, s)
        out = _finished(best, weight, total, tl.load(v_scale)).to(o.dtype.element_ty)
        to = o + token.to(tl.int64) * (G * R * D) + ((g * R + head)[:, None] * D + d[None, :])
        tl.store(to, out, mask=mine[:, None])
