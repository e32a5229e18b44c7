"""Paged attention, compiled: keys are read where they lie, narrow ones by way of a span's fp32 numbers;
bits depend on a token's own sequence alone.

The keys of a sequence come in spans of SPAN at absolute places, in order; each moves the maximum, the sum
and the output of a query once (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867). An item of
work is one key head of a few tokens of one row.
"""

import torch

from hemiola.plugins.attention.codes import rotate, store_key, store_value
from hemiola.plugins.attention.pages import CENTRES, bits_of
from hemiola.plugins.attention.spans import (
    LENS,
    ROOM,
    SPAN,
    STATE,
    WEIGHTS,
    WIDE,
    begin,
    code_place,
    find,
    lay_out,
    visit,
    widen,
)
from hemiola.plugins.attention.tiles import PANEL, PARTIALS
from hemiola.plugins.cpu.code import Case, Operand, code_of, complain, lines, numbers, numel
from hemiola.plugins.cpu.e4m3 import store_e4m3
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.rows import owned
from hemiola.plugins.cpu.simd import (
    LANES,
    copy,
    div,
    f32,
    from_bits,
    get,
    get_int,
    get_long,
    load,
    mul,
    put_long,
    splat,
    store,
)
from hemiola.plugins.sizes import Number

QUERIES = 64  # of an item of work, unless a token alone has more


def attention(
    q: Operand,  # [T, H, D]
    k: Operand,  # [T, G, D]
    v: Operand,  # [T, G, D]
    k_pages: Operand,  # [pages, page_len, G, A], written; see pages.py
    v_pages: Operand,  # [pages, page_len, G, B], written
    page_table: Operand,  # [N, W] int32
    rows: Operand,  # [N, 8]
    positions: Operand,  # [T] int32
    scale: float,
    first: int,
    k_scale: float,
    v_scale: float,
    logits_ids: Operand | None = None,  # [I] int32
) -> Operand:  # [T, H, D]
    """See reference.py. Raises IndexError for tokens, places and pages that are not there.

    Tokens that are not in `logits_ids`, if it is given, are written to their pages, and need not attend.
    """
    code, q, k, v = code_of(q), lines(q), lines(k), lines(v)
    (num_tokens, num_heads, _), (groups, depth), page_len = q.shape, k.shape[1:], k_pages.shape[1]
    copies = num_heads // groups
    tile_len = max(QUERIES // copies, 1)
    tiles, live = _tiles_of(rows, num_tokens, tile_len)
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
    k_bits = bits_of("key", k_pages.dtype, k_pages.shape[3], depth)
    v_bits = bits_of("value", v_pages.dtype, v_pages.shape[3], depth)
    narrow, turned = int(k_bits != 0), int(k_bits in CENTRES)
    lines_ = (k, k.stride(0), k_scale, v, v.stride(0), v_scale, k_bits, v_bits, k_pages.shape[0], fault)
    code.call(_write, num_tiles, numel(k) * 0.2, *table, *lines_, scratch=8 * depth)
    cost = num_tokens * table_len * (0.04 * num_heads * depth * page_len)
    room = -(-tile_len * copies // LANES) * LANES + PANEL * LANES
    score_scale = scale * k_scale * (depth**-0.5 if turned else 1.0)
    heads = (q, q.stride(0), copies, room, score_scale, v_scale, first, k_bits, v_bits, turned, out)
    if logits_ids is not None:
        some, num = code.empty(num_tiles, 3, dtype=torch.int64), logits_ids.shape[0]
        code.call(_narrow, num_tiles, num * 1.0, tiles, num, logits_ids, some)
        cost, table = num * table_len * (0.04 * num_heads * depth * page_len), (some, *table[1:])
    scratch = (8 * depth + STATE) * room + ROOM + narrow * WIDE * depth + turned * 4 * depth * room
    code.call(_attend, num_tiles * groups, cost, *table, *heads, scratch=scratch)
    return out


def _tiles_of(rows: Operand, num_tokens: Number, tile_len: int) -> tuple[Operand, Operand]:
    """The live rows of a step in pieces of at most tile_len tokens, [pieces, 3] row, first token and number
    of tokens, 0 where there are fewer pieces; and how many tokens live rows bring."""
    code, num_rows = code_of(rows), rows.shape[0]

    def cut() -> tuple[Operand, Operand]:
        most = num_tokens // tile_len + num_rows
        tiles, live = code.empty(most, 3, dtype=torch.int64), code.empty(1, dtype=torch.int64)
        fault = code.fault(Case(IndexError, "attention: rows name token {0} of {1} tokens"))
        code.call(_cut, 1, num_rows * 5.0, num_rows, num_tokens, tile_len, most, rows, tiles, live, fault)
        return tiles, live

    return code.once(("tiles", rows, tile_len), cut)


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
def _cut(item, scratch, num_rows, num_tokens, tile_len, most, rows, tiles, live, fault):
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
        for start in range(first, first + num, tile_len):
            _put_tile(tiles, found, n, start, min(tile_len, first + num - start))
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
    k, k_len, k_scale_bits, v, v_len, v_scale_bits, k_bits, v_bits, num_pages, fault,
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
        head = (page * page_len + place % page_len) * groups
        if k_bits == 0:
            copy(k, t * k_len, k_pages, head * depth, width)
            copy(v, t * v_len, v_pages, head * depth, width)
        if k_bits == 8:
            _round(k, t * k_len, from_bits(k_scale_bits), k_pages, head * depth, width)
        if v_bits == 8:
            _round(v, t * v_len, from_bits(v_scale_bits), v_pages, head * depth, width)
        for g in range(groups):
            if k_bits == 3 or k_bits == 4:
                codes, notes = code_place(k_pages, page_len * groups, head + g, depth // 8 * k_bits, 2)
                store_key(k_bits, k, t * k_len + g * depth, depth, codes, notes, scratch)
            if v_bits == 3 or v_bits == 4:
                codes, notes = code_place(v_pages, page_len * groups, head + g, depth // 8 * v_bits, 4)
                store_value(v_bits, v, t * v_len + g * depth, depth, codes, notes)


@helper
def _round(source, source_at, scale, target, target_at, size):
    """`size` numbers, in units of a scale, become e4m3."""
    for i in range(0, size, LANES):
        store_e4m3(target, target_at + i, div(load(source, source_at + i), splat(scale)))


@Kernel
def _attend(
    item, scratch, tiles, page_table, table_len, page_len, positions, k_pages, v_pages, groups, depth,
    q, q_len, copies, room, scale_bits, v_scale_bits, first, k_bits, v_bits, turned, out,
):  # fmt: skip
    """An item is one key head of one tile. q_len is from token to token of q; room is for more queries
    than an item has, by the lanes of a panel. Narrow pages are read a span at a time; queries are turned like
    the keys of codes."""
    tile, group = item // groups, item % groups
    row, start, num = _tile_of(tiles, tile)
    if num == 0:
        return
    count = num * copies
    queries, sums = scratch, scratch + 4 * room * depth
    state = sums + 4 * room * depth  # see HIGHS .. LENS
    partials = state + STATE * room
    shares = partials + 4 * PARTIALS  # numbers [SPAN, queries of a panel], or of few queries [queries, SPAN]
    places = shares + 4 * SPAN * LANES * PANEL  # of the keys of a span
    keys, values, apart = k_pages, v_pages, groups * depth
    narrow = k_bits != 0
    if narrow:
        keys, apart = places + 8 * SPAN, depth
        values = keys + 4 * SPAN * depth
    last = 0
    for n in range(count):
        position = get_int(positions, start + n // copies)
        last = max(last, position)
        put_long(state + LENS * room, n, position + 1)
    begin(state, count, room, sums, depth)
    source = q + 4 * (start * q_len + group * copies * depth)
    if turned:
        own = values + 4 * SPAN * depth
        for n in range(count):
            copy(source, n // copies * q_len + n % copies * depth, own, n * depth, depth)
            rotate(own + 4 * n * depth, depth)
        source, q_len = own, copies * depth
    lay_out(source, q_len, copies, count, depth, from_bits(scale_bits), queries)
    for span in range(first // SPAN * SPAN, last + 1, SPAN):
        table, num_keys = page_table + 4 * row * table_len, min(SPAN, last + 1 - span)
        find(table, page_len, span, num_keys, groups, group, depth, places)
        if narrow:
            heads = page_len * groups
            widen(k_pages, v_pages, k_bits, v_bits, heads, num_keys, depth, places, keys, values)
        at = 0
        while at < count:
            at += visit(
                keys, values, places, apart, depth, span, max(first - span, 0), at, count,
                queries, sums, state, room, partials, shares,
            )  # fmt: skip
    target, unit = out + 4 * (start * groups + group) * copies * depth, splat(from_bits(v_scale_bits))
    for n in range(count):
        to = target + 4 * (n // copies * groups * copies + n % copies) * depth
        weight = get(state + WEIGHTS * room, n)
        for i in range(0, depth, LANES):
            value = load(sums, n * depth + i)
            store(to, i, mul(div(value, splat(weight)), unit) if weight > f32(0.0) else value)
