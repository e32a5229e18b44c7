"""What kernels read of a step's `rows[N, 8]`, and the zeros that tokens of no live row get."""

import triton
import triton.language as tl

from hemiola.plugins.gpu import launch

CLEAR_TOKENS = tl.constexpr(launch.CLEAR_TOKENS)
_ROWS_AT_ONCE = tl.constexpr(64)
_OWNERS_AT_ONCE = tl.constexpr(128)
_WIDTH_AT_ONCE = tl.constexpr(128)


@triton.jit
def load_row(rows_ptr, n):
    """The eight columns of plugins/rows.py; no tokens in slot 0."""
    at = rows_ptr + n * 8
    first, num, drafts, slot = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    committed, edge = tl.load(at + 4), tl.load(at + 5)
    snapshot, snapshot_edge = tl.load(at + 6), tl.load(at + 7)
    num = tl.where(slot != 0, num, 0)
    return first, num, drafts, slot, committed, edge, snapshot, snapshot_edge


@triton.jit
def owner_of(rows_ptr, token, num_rows, num_tokens):
    """The live row that has the token, or -1; and then the next token that a live row may have.

    Where all rows have equally many tokens, the first look finds it.
    """
    row, behind = token * num_rows // num_tokens, num_tokens
    at = rows_ptr + row * 8
    age = token - tl.load(at)
    if (age < 0) | (age >= tl.load(at + 1)) | (tl.load(at + 3) == 0):
        row = -1
        for base in range(0, num_rows, _OWNERS_AT_ONCE):
            n = base + tl.arange(0, _OWNERS_AT_ONCE)
            of, here = rows_ptr + n * 8, n < num_rows
            first, num = tl.load(of, mask=here, other=0), tl.load(of + 1, mask=here, other=0)
            live = tl.load(of + 3, mask=here, other=0) != 0
            mine = live & (first <= token) & (token < first + num)
            row = tl.maximum(row, tl.max(tl.where(mine, n, -1), 0))
            behind = tl.minimum(behind, tl.min(tl.where(live & (first > token), first, num_tokens), 0))
    return row, behind


@triton.jit
def clear_dead_tokens(y_ptr, rows_ptr, num_rows, num_tokens, block, WIDTH: tl.constexpr):
    """Write zeros to those of the block's CLEAR_TOKENS tokens that no live row owns."""
    token = block * CLEAR_TOKENS + tl.arange(0, CLEAR_TOKENS)
    owned = tl.zeros((CLEAR_TOKENS,), tl.int32)
    for base in range(0, num_rows, _ROWS_AT_ONCE):
        n = base + tl.arange(0, _ROWS_AT_ONCE)
        at = rows_ptr + n * 8
        first = tl.load(at, mask=n < num_rows, other=0)
        num = tl.load(at + 1, mask=n < num_rows, other=0)
        slot = tl.load(at + 3, mask=n < num_rows, other=0)
        age = token[:, None] - first[None, :]
        mine = (age >= 0) & (age < num[None, :]) & (slot != 0)[None, :]
        owned = tl.maximum(owned, tl.max(mine.to(tl.int32), 1))
    dead = (owned == 0) & (token < num_tokens)
    if tl.max(dead.to(tl.int32), 0) > 0:
        for base in range(0, WIDTH, _WIDTH_AT_ONCE):
            column = base + tl.arange(0, _WIDTH_AT_ONCE)
            at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
            zeros = tl.zeros((CLEAR_TOKENS, _WIDTH_AT_ONCE), y_ptr.dtype.element_ty)
            tl.store(y_ptr + at, zeros, mask=dead[:, None] & (column < WIDTH)[None, :])


STAYS, PASSES, LONG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SHORT = tl.constexpr(16)  # tokens of a row that is not long


@triton.jit
def kind_of(num, drafts, committed, edge, CHUNK: tl.constexpr):
    """STAYS: few tokens in the edge's chunk, the edge stays; PASSES: few, and one edge at most; else LONG."""
    end = committed + num
    stays = (end <= edge + CHUNK) & (end - drafts < edge + CHUNK)
    short = (num <= _SHORT) & (end <= edge + 2 * CHUNK) & (end - drafts < edge + 2 * CHUNK)
    return tl.where(short, tl.where(stays, 0, 1), 2)


@triton.jit
def live_rows(rows_ptr, base, num_rows, lowest, highest, CHUNK: tl.constexpr):
    """Of 64 rows from `base` on: which are live and of these kinds, and their tokens, committed and edge."""
    row = base + tl.arange(0, 64)
    at, here = rows_ptr + row * 8, row < num_rows
    num, drafts = tl.load(at + 1, mask=here, other=0), tl.load(at + 2, mask=here, other=0)
    slot, committed = tl.load(at + 3, mask=here, other=0), tl.load(at + 4, mask=here, other=0)
    edge = tl.load(at + 5, mask=here, other=0)
    kind = kind_of(num, drafts, committed, edge, CHUNK)
    return (num > 0) & (slot != 0) & (kind >= lowest) & (kind <= highest), num, committed, edge


@triton.jit
def rows_of_kind(rows_ptr, base, num_rows, lowest, highest, CHUNK: tl.constexpr):
    """Of 64 rows from `base` on: their numbers, which are live and of these kinds, their ranks, how many."""
    mine, _, _, _ = live_rows(rows_ptr, base, num_rows, lowest, highest, CHUNK)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    return base + tl.arange(0, 64), mine, rank, tl.sum(mine.to(tl.int32), 0)


@triton.jit
def passing_first(order, rows, num_rows, CHUNK: tl.constexpr, WHOLE: tl.constexpr):
    """The rows' numbers, those first that pass an edge: they take longest. WHOLE: 16 places for each, with
    its columns, then the number; then, in the first, how many are long."""
    passing, before, long = 0, 0, 0
    for base in range(0, num_rows, 64):
        _, _, _, count = rows_of_kind(rows, base, num_rows, PASSES, PASSES, CHUNK)
        passing += count
        if WHOLE:
            _, _, _, count = rows_of_kind(rows, base, num_rows, LONG, LONG, CHUNK)
            long += count
    for base in range(0, num_rows, 64):
        row, mine, rank, count = rows_of_kind(rows, base, num_rows, PASSES, PASSES, CHUNK)
        place = tl.where(mine, before + rank, passing + row - (before + rank + 1))
        if WHOLE:
            for column in tl.static_range(8):
                value = tl.load(rows + row * 8 + column, mask=row < num_rows)
                tl.store(order + place * 16 + column, value, mask=row < num_rows)
            tl.store(order + place * 16 + 8, row, mask=row < num_rows)
        else:
            tl.store(order + place, row, mask=row < num_rows)
        before += count
    if WHOLE:
        tl.store(order + 9, long)
