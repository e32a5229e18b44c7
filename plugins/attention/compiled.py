"""Paged attention, compiled: keys are read where they lie; bits depend on a token's own sequence alone.

The keys of a sequence come in spans of SPAN at absolute places, in order; each moves the maximum, the sum
and the output of a query once (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867). An item of
work is one key head of up to TILE tokens of one row.
"""

import numpy as np
import torch

from hemiola.plugins.cpu.activations import exp
from hemiola.plugins.cpu.code import Case, Operand, code_of, complain, lines, numbers, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.rows import owned
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    clear,
    copy,
    div,
    f32,
    first_lanes,
    fma,
    from_bits,
    get,
    get_int,
    get_long,
    inlined,
    largest,
    load,
    mul,
    peak,
    put,
    put_long,
    settle,
    splat,
    store,
    sub,
    sums_of,
    total,
)
from hemiola.plugins.cpu.simd import (
    first as lane,
)
from hemiola.plugins.cpu.sizes import Number

SPAN = 4 * LANES
TILE = 16
ROOM = 4 * LANES * LANES + 4 * SPAN + 8 * SPAN  # bytes for products, scores and places


def attention(
    q: Operand,  # [T, H, D]
    k: Operand,  # [T, G, D]
    v: Operand,  # [T, G, D]
    k_pages: Operand,  # [pages, page_len, G, D], written
    v_pages: Operand,  # [pages, page_len, G, D], written
    page_table: Operand,  # [N, W] int32
    rows: Operand,  # [N, 8]
    positions: Operand,  # [T] int32
    scale: float,
    first: int,
    wanted: Operand | None = None,  # [L] int32
) -> Operand:  # [T, H, D]
    """See reference.py. Raises IndexError for tokens, places and pages that are not there.

    With `wanted`, other tokens are written to their pages, but need not attend: their outputs are anything.
    """
    code, q, k, v = code_of(q), lines(q), lines(k), lines(v)
    (num_tokens, num_heads, _), (groups, depth), page_len = q.shape, k.shape[1:], k_pages.shape[1]
    tiles, live = _tiles_of(rows, num_tokens)
    out, num_tiles = owned(live, *q.shape), tiles.shape[0]
    page_table, positions = numbers(page_table), numbers(positions)
    table_len = page_table.shape[1]
    table = (tiles, page_table, table_len, page_len, positions, k_pages, v_pages, groups, depth)
    fault = code.fault(
        Case(
            IndexError,
            "attention: a position is outside of a table of {0} pages, or a page id outside of {1} pages",
        )
    )
    lines_ = (k, k.stride(0), v, v.stride(0), k_pages.shape[0], fault)
    code.call(_write, num_tiles, numel(k) * 0.2, *table, *lines_)
    copies = num_heads // groups
    cost, room = (
        num_tokens * table_len * (0.04 * num_heads * depth * page_len),
        8 * TILE * copies * (depth + 1),
    )
    heads = (q, q.stride(0), copies, scale, first, out)
    if wanted is not None:
        some = code.empty(num_tiles, 3, dtype=torch.int64)
        code.call(_narrow, num_tiles, wanted.shape[0] * 1.0, tiles, wanted.shape[0], wanted, some)
        cost, table = wanted.shape[0] * table_len * (0.04 * num_heads * depth * page_len), (some, *table[1:])
    code.call(_attend, num_tiles * groups, cost, *table, *heads, scratch=room + ROOM)
    return out


def _tiles_of(rows: Operand, num_tokens: Number) -> tuple[Operand, Operand]:
    """The live rows of a step in pieces of at most TILE tokens, [pieces, 3] row, first token and number of
    tokens, 0 where there are fewer pieces; and how many tokens live rows bring."""
    code, num_rows = code_of(rows), rows.shape[0]

    def cut() -> tuple[Operand, Operand]:
        most = num_tokens // TILE + num_rows
        tiles, live = code.empty(most, 3, dtype=torch.int64), code.empty(1, dtype=torch.int64)
        fault = code.fault(Case(IndexError, "attention: rows name token {0} of {1} tokens"))
        code.call(_cut, 1, num_rows * 5.0, num_rows, num_tokens, most, rows, tiles, live, fault)
        return tiles, live

    return code.once(("tiles", rows), cut)


@helper
def _tile_of(tiles, n):
    """Its row, its first token and how many it has."""
    return get_long(tiles, 3 * n), get_long(tiles, 3 * n + 1), get_long(tiles, 3 * n + 2)


@helper
def _put_tile(tiles, n, row, start, num):
    put_long(tiles, 3 * n, row)
    put_long(tiles, 3 * n + 1, start)
    put_long(tiles, 3 * n + 2, num)


@Kernel
def _cut(item, scratch, num_rows, num_tokens, most, rows, tiles, live, fault):
    """One item: see _tiles_of."""
    found, total = 0, 0
    for n in range(num_rows):
        first, num = get_int(rows, 8 * n), get_int(rows, 8 * n + 1)
        if get_int(rows, 8 * n + 3) == 0 or num <= 0:
            continue
        total += num
        if first < 0 or first + num > num_tokens or total > num_tokens:
            complain(fault, 1, first if first < 0 else max(first + num, total), num_tokens)
            return
        for start in range(first, first + num, TILE):
            _put_tile(tiles, found, n, start, min(TILE, first + num - start))
            found += 1
    for i in range(3 * found, 3 * most):
        put_long(tiles, i, 0)
    put_long(live, 0, total)


@Kernel
def _narrow(tile, scratch, tiles, num_wanted, wanted, some):
    """A tile without what stands before its first wanted token or behind its last."""
    row, start, num = _tile_of(tiles, tile)
    low, high = start + num, start - 1
    for n in range(num_wanted):
        t = get_int(wanted, n)
        if start <= t and t < start + num:
            low, high = min(low, t), max(high, t)
    _put_tile(some, tile, row, low, max(high + 1 - low, 0))


@Kernel
def _write(
    tile, scratch, tiles, page_table, table_len, page_len, positions, k_pages, v_pages, groups, depth,
    k, k_len, v, v_len, num_pages, fault,
):  # fmt: skip
    """New keys and values of a tile go to their pages. k_len is from token to token."""
    width = groups * depth
    row, start, num = _tile_of(tiles, tile)
    lowest, highest = 0, -1
    for t in range(start, start + num):
        lowest, highest = min(lowest, get_int(positions, t)), max(highest, get_int(positions, t))
    good = lowest == 0 and highest < table_len * page_len
    for n in range(highest // page_len + 1 if good else 0):
        page = get_int(page_table, row * table_len + n)
        good = good and page >= 0 and page < num_pages
    if not good:
        complain(fault, 1, table_len, num_pages)
        return
    for t in range(start, start + num):
        place = get_int(positions, t)
        page = get_int(page_table, row * table_len + place // page_len)
        target = (page * page_len + place % page_len) * width
        copy(k, t * k_len, k_pages, target, width)
        copy(v, t * v_len, v_pages, target, width)


@Kernel
def _attend(
    item, scratch, tiles, page_table, table_len, page_len, positions, k_pages, v_pages, groups, depth,
    q, q_len, copies, scale_bits, first, out,
):  # fmt: skip
    """An item is one key head of one tile. q_len is from token to token of q."""
    scale = splat(from_bits(scale_bits))
    most = TILE * copies
    queries, sums = scratch, scratch + 4 * most * depth
    highs = sums + 4 * most * depth
    weights = highs + 4 * most
    products = weights + 4 * most
    scores = products + 4 * LANES * LANES
    places = scores + 4 * SPAN  # of the keys of a span
    tile, group = item // groups, item % groups
    row, start, num = _tile_of(tiles, tile)
    if num == 0:
        return
    last = 0
    for n in range(num * copies):
        t, head = start + n // copies, group * copies + n % copies
        last = max(last, get_int(positions, t))
        put(highs, n, f32(-np.inf))
        put(weights, n, f32(0.0))
        for i in range(0, depth, LANES):
            store(queries, n * depth + i, mul(load(q, t * q_len + head * depth + i), scale))
        clear(sums, n * depth, depth)
    for span in range(first // SPAN * SPAN, last + 1, SPAN):
        for j in range(0, min(SPAN, last + 1 - span), LANES):
            page = get_int(page_table, row * table_len + (span + j) // page_len)
            place = page * page_len + (span + j) % page_len
            for i in range(LANES):
                put_long(places, j + i, ((place + i) * groups + group) * depth)
        for n in range(num * copies):
            num_keys = min(SPAN, get_int(positions, start + n // copies) + 1 - span)
            if num_keys > 0:
                high, weight = _visit(
                    k_pages, v_pages, places, num_keys, first - span, depth,
                    queries, sums, n * depth, products, scores, get(highs, n), get(weights, n),
                )  # fmt: skip
                put(highs, n, high)
                put(weights, n, weight)
    for n in range(num * copies):
        at = ((start + n // copies) * groups * copies + group * copies + n % copies) * depth
        weight = get(weights, n)
        for i in range(0, depth, LANES):
            value = load(sums, n * depth + i)
            store(out, at + i, div(value, splat(weight)) if weight > f32(0.0) else value)


@helper
def _visit(
    k_pages, v_pages, places, num_keys, num_hidden, depth, queries, sums, query_at, products, scores,
    high, weight,
):  # fmt: skip
    """One span of keys: scores, and with a perhaps higher maximum the weight and the output so far."""
    if num_hidden >= num_keys:
        return high, weight
    nothing = splat(f32(-np.inf))
    highest = nothing
    for j in range(0, num_keys, LANES):
        _multiply(k_pages, places, j, depth, queries, query_at, products)
        score = first_lanes(sums_of(products, 0), num_keys - j, nothing)
        score = first_lanes(nothing, num_hidden - j, score)
        highest = largest(score, highest)
        store(scores, j, score)
    top = max(high, peak(highest))
    kept = f32(0.0)
    if high > f32(-np.inf):
        kept = lane(exp(splat(high - top)))
    shares = splat(f32(0.0))
    for j in range(0, num_keys, LANES):
        share = exp(sub(load(scores, j), splat(top)))
        shares = add(shares, share)
        store(scores, j, share)
    _blend(v_pages, places, max(num_hidden, 0), num_keys, depth, scores, splat(kept), sums, query_at)
    return top, weight * kept + total(shares)


@inlined
def _multiply(k_pages, places, j, depth, queries, query_at, products):
    """A vector for each of 16 keys from j on: its products with the query, whose sum is the score."""
    wide = depth // SPAN * SPAN
    for d in range(0, wide, SPAN):
        at = query_at + d
        q0, q1 = load(queries, at), load(queries, at + 16)
        q2, q3 = load(queries, at + 32), load(queries, at + 48)
        for i in range(LANES):
            at, to = get_long(places, j + i) + d, i * LANES
            value = load(k_pages, at)
            sum_ = mul(value, q0) if d == 0 else fma(value, q0, load(products, to))
            sum_ = fma(load(k_pages, at + 32), q2, fma(load(k_pages, at + 16), q1, sum_))
            store(products, to, fma(load(k_pages, at + 48), q3, sum_))
        settle()
    for d in range(wide, depth, LANES):
        q0 = load(queries, query_at + d)
        for i in range(LANES):
            value, to = load(k_pages, get_long(places, j + i) + d), i * LANES
            store(products, to, mul(value, q0) if d == 0 else fma(value, q0, load(products, to)))
        settle()


@inlined
def _blend(v_pages, places, begin, end, depth, shares, kept, sums, query_at):
    """What is kept of the output so far, and the shares of values begin .. end of a span."""
    wide = depth // SPAN * SPAN
    for d in range(0, wide, SPAN):
        at = query_at + d
        a, b = mul(load(sums, at), kept), mul(load(sums, at + 16), kept)
        c, e = mul(load(sums, at + 32), kept), mul(load(sums, at + 48), kept)
        for j in range(begin, end):
            share, place = splat(get(shares, j)), get_long(places, j) + d
            a, b = fma(share, load(v_pages, place), a), fma(share, load(v_pages, place + 16), b)
            c, e = fma(share, load(v_pages, place + 32), c), fma(share, load(v_pages, place + 48), e)
        store(sums, at, a)
        store(sums, at + 16, b)
        store(sums, at + 32, c)
        store(sums, at + 48, e)
    for d in range(wide, depth, LANES):
        a = mul(load(sums, query_at + d), kept)
        for j in range(begin, end):
            a = fma(splat(get(shares, j)), load(v_pages, get_long(places, j) + d), a)
        store(sums, query_at + d, a)
