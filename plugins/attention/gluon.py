"""Causal attention of rows of many queries on sm_90: the arithmetic of triton.py, op for op, cut otherwise.

Two groups of four warps have 64 queries each and go at their own pace, so that one multiplies while the other
makes its softmax; a warp of its own brings keys and values in boxes (TMA), which both read. The interpreter
cannot run it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_NOTHING = gl.constexpr(-1e30)
_GROUP = gl.constexpr(1024)  # as in cuda.py
_TILE = gl.constexpr(64)  # keys
_OWN = gl.constexpr(64)  # queries of four warps
_BOTH = gl.constexpr(128)


@gluon.jit(do_not_specialize=["num_rows", "table_len", "most"])
def _prompt(
    q, k_pages, v_pages, page_table, rows, o, scale, unit_v, num_rows, table_len, most, q_len,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, L: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    # Grid: one program per multiprocessor, which goes from item to item: 128 queries of a row of more than
    # `most`, one key head, all keys. A row's last queries first, for they see the most.
    # Tile: 128 rows (token, head of the group) against 64 keys.
    # Traffic: keys and values once per 128 queries of a row.
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, _OWN, D], k_pages.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _TILE, D], k_pages.layout)
    left_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _TILE, D // 2], v_pages.layout)
    right_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _TILE, D // 2], v_pages.layout)
    ones_s = gl.allocate_shared_memory(gl.bfloat16, [16, _TILE], k_pages.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    cleared = gl.allocate_shared_memory(gl.int64, [1], bar)
    mbarrier.init(cleared, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_there.index(i), count=1)
        mbarrier.init(v_there.index(i), count=1)
        mbarrier.init(k_read.index(i), count=2)
        mbarrier.init(v_read.index(i), count=2)
    across: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones_s.store(gl.full((16, _TILE), 1.0, gl.bfloat16, across))
    fence_async_shared()
    memory = (q_s, k_s, left_s, right_s, ones_s, k_there, k_read, v_there, v_read, cleared)
    gl.warp_specialize(
        [(_multiply, (0, q, rows, o, memory, scale, unit_v, num_rows, most, q_len, G, R, D, FIRST, STAGES)),
         (_multiply, (1, q, rows, o, memory, scale, unit_v, num_rows, most, q_len, G, R, D, FIRST, STAGES)),
         (_bring, (k_pages, v_pages, page_table, rows, memory, num_rows, table_len, most,
                   G, R, D, L, STAGES))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _rank(wave):
    """To and fro, so that programs end together."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    back = programs - 1 - program
    return wave * programs + gl.where(wave % 2 == 0, program, back)


@gluon.jit
def _found(rows, num_rows, most, i, row, last, R: gl.constexpr):
    """The row that has block i of all blocks of queries, and which block is behind its last; num_rows if none
    has. Looked for from `row` on, whose blocks end before `last`: every program walks over all rows once."""
    row, last = gl.to_tensor(row), gl.to_tensor(last)
    while (last <= i) & (row < num_rows):
        row += 1
        if row < num_rows:
            num, slot = gl.load(rows + row * 8 + 1), gl.load(rows + row * 8 + 3)
            last += gl.where((slot != 0) & (num * R > most), (num * R + _BOTH - 1) // _BOTH, 0)
    return row, last


@gluon.jit
def _seen(num, committed, block, R: gl.constexpr):
    """Keys that a block's last query sees."""
    return committed + gl.minimum(num - 1, (block * _BOTH + _BOTH - 1) // R) + 1


@gluon.jit
def _bring(
    k_pages, v_pages, page_table, rows, memory, num_rows, table_len, most,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, L: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values of all items' tiles, as soon as both have read what was in their place."""
    _, k_s, left_s, right_s, _, k_there, k_read, v_there, v_read, _ = memory
    count, wave = gl.to_tensor(0), gl.to_tensor(0)
    row, last = _found(rows, num_rows, most, _rank(0) // G, -1, 0, R)
    while row < num_rows:
        g, block = _rank(wave) % G, last - 1 - _rank(wave) // G
        num, committed = gl.load(rows + row * 8 + 1), gl.load(rows + row * 8 + 4)
        table = page_table + row * table_len
        for place in range(0, _seen(num, committed, block, R), _TILE):
            stage, phase = count % STAGES, (count // STAGES) & 1
            line = gl.load(table + place // L) * L + place % L
            mbarrier.wait(k_read.index(stage), phase ^ 1)
            mbarrier.expect(k_there.index(stage), _TILE * D * 2)
            tma.async_copy_global_to_shared(k_pages, [line, g * D], k_there.index(stage), k_s.index(stage))
            there = v_there.index(stage)
            mbarrier.wait(v_read.index(stage), phase ^ 1)
            mbarrier.expect(there, _TILE * D * 2)
            tma.async_copy_global_to_shared(v_pages, [line, g * D], there, left_s.index(stage))
            tma.async_copy_global_to_shared(v_pages, [line, g * D + D // 2], there, right_s.index(stage))
            count += 1
        wave += 1
        row, last = _found(rows, num_rows, most, _rank(wave) // G, row, last, R)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, q, rows, o, memory, scale, unit_v, num_rows, most, q_len, G: gl.constexpr,
    R: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of all items' queries."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    count, clears, wave = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    row, last = _found(rows, num_rows, most, _rank(0) // G, -1, 0, R)
    while row < num_rows:
        g, block = _rank(wave) % G, last - 1 - _rank(wave) // G
        begin, num = gl.load(rows + row * 8), gl.load(rows + row * 8 + 1)
        committed = gl.load(rows + row * 8 + 4)
        low = block * _BOTH + WHICH * _OWN
        _queries(memory[0].index(WHICH), q, q_len, begin, num, low, g, R, D)
        high, end = _seen(num, committed, block, R), committed + num
        best, weight, left, right, count, clears = _span(
            WHICH, memory, count, clears, low, high, end, committed, scale, R, D, FIRST, STAGES
        )
        _store(o, begin, num, low, g, best, weight, left, unit_v, 0, half, G, R, D)
        _store(o, begin, num, low, g, best, weight, right, unit_v, D // 2, half, G, R, D)
        wave += 1
        row, last = _found(rows, num_rows, most, _rank(wave) // G, row, last, R)


@gluon.jit
def _queries(to, q, q_len, begin, num, low, g, R: gl.constexpr, D: gl.constexpr):
    """From `low` on, (token, head of the group) by line; zeros behind the row's last."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m = low + gl.arange(0, _OWN, gl.SliceLayout(1, flat))
    d = gl.arange(0, D, gl.SliceLayout(0, flat))
    at = (begin.to(gl.int64) + m // R) * q_len + (g * R + m % R) * D
    to.store(gl.load(q + at[:, None] + d[None, :], mask=(m // R < num)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _span(
    WHICH: gl.constexpr, memory, count, clears, low, high, end, committed, scale,
    R: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Groups joined: largest score, sum of weights, both halves of the weighted sum of values."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    position = committed + (low + gl.arange(0, _OWN, by_row)) // R
    best, weight = gl.full((_OWN,), _NOTHING, gl.float32, by_row), gl.zeros((_OWN,), gl.float32, by_row)
    left, right = gl.zeros((_OWN, D // 2), gl.float32, half), gl.zeros((_OWN, D // 2), gl.float32, half)
    for begin in range(0, high, _GROUP):
        own_best = gl.full((_OWN,), _NOTHING, gl.float32, by_row)
        own_weight = gl.zeros((_OWN,), gl.float32, by_row)
        own_left = gl.zeros((_OWN, D // 2), gl.float32, half)
        own_right = gl.zeros((_OWN, D // 2), gl.float32, half)
        for place in range(begin, gl.minimum(begin + _GROUP, high), _TILE):
            unwritten = (place < FIRST) | (place + _TILE > end)
            own_best, own_weight, own_left, own_right = _tile(
                WHICH, memory, count, clears, unwritten, place, end, position, scale, own_best, own_weight,
                own_left, own_right, scores, half, D, FIRST, STAGES,
            )  # fmt: skip
            count += 1
            clears += unwritten.to(gl.int32)
        best, mine, other = _faded(best, own_best)
        weight = gl.fma(own_weight, other, weight * mine)
        left = _joined(left, own_left, mine, other, half)
        right = _joined(right, own_right, mine, other, half)
    return best, weight, left, right, count, clears


@gluon.jit
def _tile(
    WHICH: gl.constexpr, memory, count, clears, unwritten, place, end, position, scale, best, weight,
    left, right, scores: gl.constexpr, half: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A tile's softmax, joined to those before. A tile without a key that a query sees adds nothing to it.

    `part` is both halves' in turn: with both at once there would be no registers left.
    """
    q_s, k_s, left_s, right_s, ones_s, k_there, k_read, v_there, v_read, cleared = memory
    sums_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    stage, phase = count % STAGES, (count // STAGES) & 1
    score = gl.zeros((_OWN, _TILE), gl.float32, scores)
    keys = k_s.index(stage).permute((1, 0))
    mbarrier.wait(k_there.index(stage), phase)
    score = warpgroup_mma(q_s.index(WHICH), keys, score, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, (score,))
    mbarrier.arrive(k_read.index(stage))
    score = _visible(score, place, position, scores, FIRST)
    share, high = _shares(score, scale, scores, half)
    best, mine, other = _faded(best, high)
    mbarrier.wait(v_there.index(stage), phase)
    if unwritten:
        _clear((left_s, right_s)[WHICH].index(stage), place, end, D // 2, FIRST)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(cleared)
        mbarrier.wait(cleared, clears & 1)
    sums = gl.zeros((_OWN, 16), gl.float32, sums_of)
    part = gl.zeros((_OWN, D // 2), gl.float32, half)
    again = gl.convert_layout(share, gl.DotOperandLayout(0, sums_of, 2), assert_trivial=True)
    sums = warpgroup_mma(again, ones_s.permute((1, 0)), sums, use_acc=False, is_async=True)
    part = warpgroup_mma(share, left_s.index(stage), part, use_acc=False, is_async=True)
    sums, part = warpgroup_mma_wait(0, (sums, part))
    summed = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, scores), assert_trivial=True)
    weight = gl.fma(summed, other, weight * mine)
    left = _joined(left, part, mine, other, half)
    part = warpgroup_mma(share, right_s.index(stage), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, (part,))
    mbarrier.arrive(v_read.index(stage))
    return best, weight, left, _joined(right, part, mine, other, half)


@gluon.jit
def _visible(score, place, position, layout: gl.constexpr, FIRST: gl.constexpr):
    """Scores of keys that are not seen are nothing; 2 to the 30: behind every position."""
    key = place + gl.arange(0, _TILE, gl.SliceLayout(0, layout))
    if FIRST > 0:
        key = gl.where(key >= FIRST, key, 2**30)
    return gl.where(key[None, :] <= position[:, None], score, _NOTHING)


@gluon.jit
def _shares(score, scale, layout: gl.constexpr, half: gl.constexpr):
    """exp2 of scores relative to the largest, for a product; and that."""
    top = gl.max(score, 1)
    high = gl.where(top > _NOTHING, top * scale, 0.0)
    scales = gl.full(score.shape, 0.0, gl.float32, layout) + scale
    share = gl.exp2(gl.fma(score, scales, (-high)[:, None].broadcast_to(score.shape)))
    share = gl.convert_layout(share.to(gl.bfloat16), gl.DotOperandLayout(0, half, 2))
    return share, gl.where(top > _NOTHING, high, _NOTHING)


@gluon.jit
def _clear(values, place, end, WIDTH: gl.constexpr, FIRST: gl.constexpr):
    """Zeros for places outside of FIRST..end: memory that nobody wrote may hold NaN. Each group of warps
    clears one half of the values, and both wait for it."""
    across: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    at = place + gl.arange(0, _TILE, gl.SliceLayout(1, across))
    values.store(gl.where(((at >= FIRST) & (at < end))[:, None], values.load(across), 0.0))


@gluon.jit
def _faded(best, other_best):
    """The larger of two scores, and what numbers relative to each are worth relative to it."""
    new_best = gl.maximum(best, other_best)
    return new_best, gl.exp2(best - new_best), gl.exp2(other_best - new_best)


@gluon.jit
def _joined(total, own, mine, other, layout: gl.constexpr):
    """total * mine + own * other, by rows."""
    mine = gl.convert_layout(mine, gl.SliceLayout(1, layout), assert_trivial=True)
    other = gl.convert_layout(other, gl.SliceLayout(1, layout), assert_trivial=True)
    other = gl.expand_dims(other, 1).broadcast_to(own.shape)
    return gl.fma(own, other, total * gl.expand_dims(mine, 1))


@gluon.jit
def _store(
    o, begin, num, low, g, best, weight, total, unit_v, column: gl.constexpr, layout: gl.constexpr,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """A half of the outputs of queries that have seen all their keys; zeros for one that sees none."""
    best = gl.convert_layout(best, gl.SliceLayout(1, layout), assert_trivial=True)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, layout), assert_trivial=True)
    m = low + gl.arange(0, _OWN, gl.SliceLayout(1, layout))
    d = column + gl.arange(0, D // 2, gl.SliceLayout(0, layout))
    to = o + ((begin.to(gl.int64) + m // R) * (G * R * D) + (g * R + m % R) * D)[:, None] + d[None, :]
    out = gl.where((best > _NOTHING)[:, None], total / weight[:, None] * unit_v, 0.0)
    gl.store(to, out.to(gl.bfloat16), mask=(m // R < num)[:, None])
