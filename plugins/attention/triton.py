"""Causal attention over pages on CUDA: one arithmetic for prompts and decode.

Keys stand in groups of GROUP at absolute positions, in tiles of TILE. A tile has its own softmax; tiles of
a group are joined in order, then groups (Milakov and Gimelshein 2018, arXiv 1805.02867). A row of few queries
gives every group to another program, or a few tiles where few rows leave the GPU empty; `_join` joins their
numbers in the same order. Others walk all groups in one program. All queries of a key head that fit a tile of
queries share what is read. Row sums are products with ones: tl.sum would depend on how warps share a row.
Multiply-adds are contracted where it says `tl.fma`, nowhere else. What pages of codes hold is
multiplied in fp16 (triton_narrow.py).
"""

import triton
import triton.language as tl

from hemiola.plugins.attention.triton_narrow import in_fp16, read_keys, read_values
from hemiola.plugins.attention.triton_narrow import pack as pack
from hemiola.plugins.gpu.precise import dot
from hemiola.plugins.gpu.rows import CLEAR_TOKENS, clear_dead_tokens

_NOTHING = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_len"])
def _write(
    k, v, k_pages, v_pages, page_table, rows, positions, o, k_scale, v_scale, num_rows, num_tokens, table_len,
    k_len, v_len, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr, N_ROWS: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    # Grid: one program per 16 tokens that stores their k and v, one that clears dead tokens' outputs.
    # Tile: [16 tokens, D] of one key head after the other.
    # Traffic: k and v of live tokens once in and once out, where pages have no codes of them.
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
            to = at[:, None] + (g * D + d)[None, :]
            if K_BITS == 0:
                value_k = tl.load(k + source * k_len + (g * D + d)[None, :], mask=live[:, None], other=0.0)
            if V_BITS == 0:
                value_v = tl.load(v + source * v_len + (g * D + d)[None, :], mask=live[:, None], other=0.0)
            if K_BITS == 0:
                kept = _rounded(value_k, k_scale, k_pages.dtype.element_ty)
                tl.store(k_pages + to, kept, mask=live[:, None])
            if V_BITS == 0:
                kept = _rounded(value_v, v_scale, v_pages.dtype.element_ty)
                tl.store(v_pages + to, kept, mask=live[:, None])


@triton.jit
def _rounded(value, scale, dtype: tl.constexpr):
    """As a page keeps it."""
    if dtype == value.dtype:
        return value
    else:
        scaled = tl.div_rn(value.to(tl.float32), scale)
        return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _shares(
    rows, num_rows, most, capacity, enough, G: tl.constexpr, R: tl.constexpr, N_ROWS: tl.constexpr,
    BM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """By row: tokens, their place, keys, blocks of queries, pieces to be joined, where these start.

    And how many keys a piece has: a group's, or a tile's where there are fewer groups than `enough`. Rows of
    more than `most` queries have no tokens here: they are gluon.py's.
    """
    n = tl.arange(0, N_ROWS)
    begin = tl.load(rows + n * 8, mask=n < num_rows, other=0)
    num = tl.load(rows + n * 8 + 1, mask=n < num_rows, other=0)
    slot = tl.load(rows + n * 8 + 3, mask=n < num_rows, other=0)
    committed = tl.load(rows + n * 8 + 4, mask=n < num_rows, other=0)
    num = tl.where((slot != 0) & (num * R <= most), num, 0)
    blocks = (num * R + BM - 1) // BM
    keys = tl.where(blocks == 1, committed + num, 0)
    piece_len = tl.where(tl.sum((keys + GROUP - 1) // GROUP, 0) * G < enough, TILE, GROUP)
    pieces = (keys + piece_len - 1) // piece_len
    pieces = tl.where(pieces > 1, pieces, 0)
    start = tl.cumsum(pieces, 0) - pieces
    pieces = tl.where(start + pieces <= capacity, pieces, 0)
    return n, begin, num, committed, keys, blocks, pieces, start, piece_len


@triton.jit
def _of(values, n, row):
    """values[row]"""
    return tl.sum(tl.where(n == row, values, 0), 0)


@triton.jit(do_not_specialize=["first", "num_rows", "table_len", "most", "capacity", "enough"])
def _attend(
    q, k_pages, v_pages, page_table, rows, o, partial, scale, unit_v, first, num_rows, table_len,
    most, capacity, enough, q_len, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    N_ROWS: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out items: a group or a few tiles of a row of few queries, or all keys of BM
    # queries.
    # Tile: BM rows (token, head of the group) against TILE keys of one key head.
    # Traffic: keys and values once per BM queries of a row; a piece's numbers once where others join them.
    n, begin, num, committed, keys, blocks, pieces, start, piece_len = _shares(
        rows, num_rows, most, capacity, enough, G, R, N_ROWS, BM, GROUP, TILE
    )
    RUNS: tl.constexpr = BM < 128  # shared memory for tiles of two loops
    CODED: tl.constexpr = (K_BITS > 0 or V_BITS > 0) and o.dtype.element_ty != tl.float32
    at_once = tl.maximum(tl.cdiv(tl.sum(pieces, 0) * G, tl.num_programs(0)), 1)
    item_len = tl.where((piece_len < GROUP) & RUNS, at_once, 1) * piece_len
    items = tl.where(pieces > 0, tl.cdiv(keys, item_len), blocks)
    whole = tl.where(pieces > 0, keys // item_len, blocks)
    last_whole, last_end = tl.cumsum(whole, 0), tl.cumsum(items - whole, 0)
    num_whole, num_items = tl.sum(whole, 0), tl.sum(items, 0) * G
    if first < 0:
        first = 0
    programs, program = tl.num_programs(0), tl.program_id(0)
    for wave in range(0, num_items, programs):
        # long items first, ends of rows last, and to and fro: so programs end together
        rank = wave + tl.where((wave // programs) % 2 == 0, program, programs - 1 - program)
        if rank < num_items:
            g, i = rank % G, rank // G
            row, inside = _item(i, num_whole, n, whole, last_whole, last_end)
            row_pieces, row_num = _of(pieces, n, row), _of(num, n, row)
            row_begin, row_committed = _of(begin, n, row), _of(committed, n, row)
            block = tl.where(row_pieces > 0, 0, inside)
            m, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
            t, head = m // R, g * R + m % R
            live, position = t < row_num, row_committed + t
            token = row_begin.to(tl.int64) + t
            at = token[:, None] * q_len + (head[:, None] * D + d[None, :])
            q_m = tl.load(q + at, mask=live[:, None], other=0.0)
            row_scale = tl.zeros((BM,), tl.float32) + scale
            if CODED:
                q_m, unit = in_fp16(q_m)
                row_scale *= unit
            low = tl.where(row_pieces > 0, inside * item_len, 0)
            high = row_committed + tl.minimum(row_num - 1, (block * BM + BM - 1) // R) + 1
            high = tl.where(row_pieces > 0, tl.minimum(low + item_len, high), high)
            table = page_table + row * table_len
            all_sums = partial + (capacity * G * BM).to(tl.int64) * D
            row_start = _of(start, n, row)
            if (row_pieces > 0) & (piece_len < GROUP) & RUNS:
                _apart(
                    q_m, k_pages, v_pages, table, low, high, position, first, row_scale, partial, all_sums,
                    row_start, g, live, G, D, L, BM, TILE, K_BITS, V_BITS,
                )  # fmt: skip
            else:
                best, weight, left, right = _span(
                    q_m, k_pages, v_pages, table, low, high, position, first, row_scale, g, G, D, L, BM,
                    GROUP, TILE, K_BITS, V_BITS,
                )  # fmt: skip
                if row_pieces > 0:
                    place = ((row_start + inside) * G + g) * BM
                    _keep(partial, all_sums, place, best, weight, left, right, live, D, BM)
                else:
                    _store(o, token, head, best, weight, left, right, unit_v, live, G, R, D)


@triton.jit
def _item(i, num_whole, n, whole, last_whole, last_end):
    """(row, which of its items): whole ones from the last row's last back, then the ends of rows."""
    is_end, from_last = i >= num_whole, num_whole - 1 - i
    row = tl.where(
        is_end,
        tl.sum((last_end <= i - num_whole).to(tl.int32), 0),
        tl.sum((last_whole <= from_last).to(tl.int32), 0),
    )
    return row, tl.where(is_end, _of(whole, n, row), from_last - _of(last_whole - whole, n, row))


@triton.jit
def _store(
    o, token, head, best, weight, left, right, unit_v, live, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr
):
    """Outputs of queries that have seen all their keys."""
    to = o + token[:, None] * (G * R * D) + (head[:, None] * D + tl.arange(0, D // 2)[None, :])
    out = _outputs(best, weight, left, unit_v).to(o.dtype.element_ty)
    tl.store(to, out, mask=live[:, None])
    out = _outputs(best, weight, right, unit_v).to(o.dtype.element_ty)
    tl.store(to + D // 2, out, mask=live[:, None])


@triton.jit
def _keep(partial, all_sums, place, best, weight, left, right, live, D: tl.constexpr, BM: tl.constexpr):
    """A piece's numbers, for `_join`."""
    row = tl.arange(0, BM)
    numbers = partial + place.to(tl.int64) * D + (row[:, None] * D + tl.arange(0, D // 2)[None, :])
    tl.store(numbers, left, mask=live[:, None])
    tl.store(numbers + D // 2, right, mask=live[:, None])
    tl.store(all_sums + place * 2 + row * 2, best, mask=live)
    tl.store(all_sums + place * 2 + row * 2 + 1, weight, mask=live)


@triton.jit
def _apart(
    q_m, k_pages, v_pages, table, low, high, position, first, scale, partial, all_sums, start, g, live,
    G: tl.constexpr, D: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """Tiles whose numbers are kept one by one."""
    nothing, zero = tl.full((BM,), _NOTHING, tl.float32), tl.zeros((BM,), tl.float32)
    zeros = tl.zeros((BM, D // 2), tl.float32)
    page = tl.load(table + low // L)
    for place in range(low, high, TILE):
        score, v_left, v_right = _read_tile(
            q_m, k_pages, v_pages, table, page, place, high, position, first, g, G, D, L, TILE, K_BITS, V_BITS
        )
        page = tl.load(table + (place + TILE) // L, mask=place + TILE < high, other=0)
        best, weight, left, right = _tile(score, v_left, v_right, scale, nothing, zero, zeros, zeros, TILE)
        to = ((start + place // TILE) * G + g) * BM
        _keep(partial, all_sums, to, best, weight, left, right, live, D, BM)


@triton.jit
def _span(
    q_m, k_pages, v_pages, table, low, high, position, first, scale, g, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
):  # fmt: skip
    """Groups joined: largest score, sum of weights, both halves of the weighted sum of values.

    Halves, for a group's sums wait in registers while a tile's are made. Those of all groups wait in local
    memory, if heads are large, which nothing inside of a group reads.
    """
    best, weight = tl.full((BM,), _NOTHING, tl.float32), tl.zeros((BM,), tl.float32)
    left, right = tl.zeros((BM, D // 2), tl.float32), tl.zeros((BM, D // 2), tl.float32)
    for begin in range(low, high, GROUP):
        own_best, own_weight, own_left, own_right = _group(
            q_m, k_pages, v_pages, table, begin, tl.minimum(begin + GROUP, high), position, first, scale,
            g, G, D, L, BM, TILE, K_BITS, V_BITS,
        )  # fmt: skip
        best, mine, other = _faded(best, own_best)
        weight = tl.fma(own_weight, other, weight * mine)
        left = tl.fma(own_left, other[:, None], left * mine[:, None])
        right = tl.fma(own_right, other[:, None], right * mine[:, None])
    return best, weight, left, right


@triton.jit
def _group(
    q_m, k_pages, v_pages, table, low, high, position, first, scale, g, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """Tiles joined."""
    best, weight = tl.full((BM,), _NOTHING, tl.float32), tl.zeros((BM,), tl.float32)
    left, right = tl.zeros((BM, D // 2), tl.float32), tl.zeros((BM, D // 2), tl.float32)
    page = tl.load(table + low // L)  # one tile ahead: then keys and values can be several ahead
    for place in range(low, high, TILE):
        score, v_left, v_right = _read_tile(
            q_m, k_pages, v_pages, table, page, place, high, position, first, g, G, D, L, TILE, K_BITS, V_BITS
        )
        page = tl.load(table + (place + TILE) // L, mask=place + TILE < high, other=0)
        best, weight, left, right = _tile(score, v_left, v_right, scale, best, weight, left, right, TILE)
    return best, weight, left, right


@triton.jit
def _read_tile(
    q_m, k_pages, v_pages, table, page, place, high, position, first, g, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, TILE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile's keys, and both halves of its values."""
    key = place + tl.arange(0, TILE)
    seen = (key[None, :] <= position[:, None]) & (key >= first)[None, :]
    if K_BITS == 0:
        k_n = _read(k_pages + g * D, table, page, place, first, high, D, G, D, L, TILE, q_m.dtype)
        score = dot(q_m, tl.trans(k_n))
    else:
        k_n, size = read_keys(k_pages, table, page, place, first, high, g, G, D, L, TILE, K_BITS, q_m.dtype)
        score = dot(q_m, tl.trans(k_n)) * size[None, :]
    score = tl.where(seen, score, _NOTHING)
    if V_BITS == 0:
        head = v_pages + g * D
        v_left = _read(head, table, page, place, first, high, D // 2, G, D, L, TILE, q_m.dtype)
        v_right = _read(head + D // 2, table, page, place, first, high, D // 2, G, D, L, TILE, q_m.dtype)
    else:
        v_left, v_right = read_values(
            v_pages, table, page, place, first, high, g, G, D, L, TILE, V_BITS, q_m.dtype
        )
    return score, v_left, v_right


@triton.jit
def _read(
    pages, table, page, low, first, high, WIDTH: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr, TILE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """WIDTH numbers of every key of a tile, which begins on `page`; zeros for places outside of first..high.

    Memory that nobody wrote may hold NaN.
    """
    place = low + tl.arange(0, TILE)
    real = (place >= first) & (place < high)
    if L % TILE == 0:
        pages += (page.to(tl.int64) * L + low % L) * (G * D)
        lines = tl.arange(0, TILE) * (G * D)
    else:
        own = tl.load(table + place // L, mask=real, other=0).to(tl.int64)
        lines = (own * L + place % L) * (G * D)
    at = pages + (lines[:, None] + tl.arange(0, WIDTH)[None, :])
    number = tl.load(at, mask=real[:, None], other=0.0)
    if pages.dtype.element_ty == tl.float8e4nv:
        number = number.to(tl.float32)  # sm_89 does not convert fp16, which is on the way, to bf16
    return number.to(dtype)


@triton.jit
def _tile(score, v_left, v_right, scale, best, weight, left, right, TILE: tl.constexpr):
    """A tile's softmax, joined to those before. A tile without a key that a query sees adds nothing to it."""
    top = tl.max(score, 1)
    high = tl.where(top > _NOTHING, top * scale, 0.0)
    share = tl.exp2(tl.fma(score, scale[:, None], -high[:, None])).to(v_left.dtype)
    best, mine, other = _faded(best, tl.where(top > _NOTHING, high, _NOTHING))
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(v_left.dtype)
    weight = tl.fma(tl.max(dot(share, ones), 1), other, weight * mine)
    left = tl.fma(dot(share, v_left), other[:, None], left * mine[:, None])
    right = tl.fma(dot(share, v_right), other[:, None], right * mine[:, None])
    return best, weight, left, right


@triton.jit
def _faded(best, other_best):
    """The larger of two scores, and what numbers relative to each are worth relative to it."""
    new_best = tl.maximum(best, other_best)
    return new_best, tl.exp2(best - new_best), tl.exp2(other_best - new_best)


@triton.jit
def _outputs(best, weight, total, unit_v):
    """Of sums, once all keys were seen; zeros for a query that sees none."""
    return tl.where((best > _NOTHING)[:, None], total / weight[:, None] * unit_v, 0.0)


@triton.jit(do_not_specialize=["num_rows", "most", "capacity", "enough"])
def _join(
    rows, o, partial, unit_v, num_rows, most, capacity, enough, G: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, L: tl.constexpr, N_ROWS: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    # Grid: one program per token of a row that is in pieces, key head and PART of its depth.
    # Tile: [heads of the group, PART] of one piece after the other.
    # Traffic: every number of a piece once in, outputs once out.
    PARTS: tl.constexpr = D // PART
    part, g, i = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % G, tl.program_id(0) // (PARTS * G)
    n, begin, num, _, _, _, pieces, start, piece_len = _shares(
        rows, num_rows, most, capacity, enough, G, R, N_ROWS, BM, GROUP, TILE
    )
    num = tl.where(pieces > 0, num, 0)
    last = tl.cumsum(num, 0)
    if i < tl.sum(num, 0):
        row = tl.sum((last <= i).to(tl.int32), 0)
        inside = i - _of(last - num, n, row)
        token = _of(begin, n, row) + inside
        AT_ONCE: tl.constexpr = GROUP // TILE
        HEADS: tl.constexpr = triton.next_power_of_2(R)
        head, d = tl.arange(0, HEADS), part * PART + tl.arange(0, PART)
        m, mine = inside * R + tl.minimum(head, R - 1), head < R
        row_start, row_pieces = _of(start, n, row), _of(pieces, n, row)
        nothing = tl.full((HEADS,), _NOTHING, tl.float32)
        zero, zeros = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, PART), tl.float32)
        best, weight, total = nothing, zero, zeros
        b, w, s = nothing, zero, zeros
        all_sums = partial + (capacity * G * BM).to(tl.int64) * D
        for low in range(0, row_pieces, AT_ONCE):
            if piece_len < GROUP:  # tiles: these are a group
                b, w, s = nothing, zero, zeros
            b, w, s = _joined(
                b, w, s, partial, all_sums, row_start, low, row_pieces, g, m, d, G, D, BM, AT_ONCE
            )
            if piece_len < GROUP:
                best, faded, other = _faded(best, b)
                weight = tl.fma(w, other, weight * faded)
                total = tl.fma(s, other[:, None], total * faded[:, None])
            else:
                best, weight, total = b, w, s
        out = _outputs(best, weight, total, unit_v).to(o.dtype.element_ty)
        to = o + token.to(tl.int64) * (G * R * D) + ((g * R + head)[:, None] * D + d[None, :])
        tl.store(to, out, mask=mine[:, None])


@triton.jit
def _joined(
    best, weight, total, partial, all_sums, start, low, high, g, m, d, G: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """And the next pieces; with registers enough, all are on their way before the first is joined."""
    bests, weights, totals = (), (), ()
    for j in tl.static_range(AT_ONCE):
        at = ((start + tl.minimum(low + j, high - 1)) * G + g) * BM
        bests += (tl.load(all_sums + at * 2 + m * 2),)
        weights += (tl.load(all_sums + at * 2 + m * 2 + 1),)
        totals += (tl.load(partial + at.to(tl.int64) * D + (m[:, None] * D + d[None, :])),)
    for j in tl.static_range(AT_ONCE):
        there = low + j < high
        new_best, faded, other = _faded(best, bests[j])
        weight = tl.where(there, tl.fma(weights[j], other, weight * faded), weight)
        total = tl.where(there, tl.fma(totals[j], other[:, None], total * faded[:, None]), total)
        best = tl.where(there, new_best, best)
    return best, weight, total
