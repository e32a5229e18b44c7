"""What queries of one key head see of a span of keys: scores, and from them maxima, shares and outputs.

Few queries are scored one by one, 16 keys side by side; many in panels, queries side by side: by the same
chains and trees of sums, so that a query's bits do not depend on its company.
"""

import numpy as np

from hemiola.plugins.attention.codes import load_key, load_value
from hemiola.plugins.attention.tiles import KEYS, PANEL, PARTIALS, ROWS, WIDEST, output_tile, score_tile
from hemiola.plugins.cpu.activations import exp
from hemiola.plugins.cpu.e4m3 import load_e4m3
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    clear,
    f32,
    first_lanes,
    fma,
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
    where_less,
)
from hemiola.plugins.cpu.simd import (
    first as lane,
)

SPAN = 4 * LANES
FEW = 8  # queries that are scored one by one
# Of each query: how many keys it sees (int64), the maximum, the sum of shares, what is kept of the outputs so
# far, how many keys of the span it sees, and 1; at so many bytes times the room for queries.
LENS, HIGHS, WEIGHTS, KEPT, ENDS, ONES, STATE = 0, 8, 12, 16, 20, 24, 28
WIDE = 8 * SPAN  # bytes, times the numbers of a head, for keys and values of a span whose pages are narrow
ROOM = 4 * (PARTIALS + SPAN * LANES * PANEL) + 8 * SPAN  # bytes for partial sums, shares and places of a span


@helper
def begin(state, count, room, sums, depth):
    """Nothing is seen yet."""
    for n in range(count + PANEL * LANES):
        put(state + HIGHS * room, n, f32(-np.inf))
        put(state + WEIGHTS * room, n, f32(0.0))
        put(state + ONES * room, n, f32(1.0))
    clear(sums, 0, count * depth)


@helper
def _panel_of(at, count):
    """How many queries stand side by side from the query `at` on."""
    return LANES * PANEL if count - at > LANES else LANES


@helper
def lay_out(q, q_len, copies, count, depth, scale, queries):
    """Queries times scale: few one behind the other, many in panels [depth, queries]."""
    if count <= FEW:
        for n in range(count):
            source = n // copies * q_len + n % copies * depth
            for i in range(0, depth, LANES):
                store(queries, n * depth + i, mul(load(q, source + i), splat(scale)))
        return
    at = 0
    while at < count:
        width = _panel_of(at, count)
        for n in range(at, at + width):
            source, target = n // copies * q_len + n % copies * depth, at * depth + n - at
            for d in range(depth):
                put(queries, target + d * width, get(q, source + d) * scale if n < count else f32(0.0))
        at += width


@helper
def find(page_table, page_len, span, num_keys, groups, group, depth, places):
    """Where keys and values of a span lie, in whole vectors of keys."""
    for j in range(0, num_keys, LANES):
        place = get_int(page_table, (span + j) // page_len) * page_len + (span + j) % page_len
        for i in range(LANES):
            put_long(places, j + i, ((place + i) * groups + group) * depth)


@helper
def code_place(pages, heads, head, code_len, note_len):
    """Addresses of a head's codes, of code_len bytes, and notes. `heads`: of all tokens of a page."""
    page, inside = pages + head // heads * heads * (code_len + note_len), head % heads
    return page + inside * code_len, page + heads * code_len + inside * note_len


@helper
def widen(k_pages, v_pages, k_bits, v_bits, heads, num_keys, depth, places, keys, values):
    """Keys and values of a span as fp32, [SPAN, depth] each, and their places there.

    Pages have e4m3 or codes; `heads` is how many a page has, of all its tokens."""
    for j in range(-(-num_keys // LANES) * LANES):
        source, target = get_long(places, j), j * depth
        put_long(places, j, target)
        if k_bits == 8:
            _widen_e4m3(k_pages, source, keys, target, depth)
        else:
            codes, notes = code_place(k_pages, heads, source // depth, depth // 8 * k_bits, 2)
            load_key(k_bits, codes, notes, depth, keys, target)
        if v_bits == 8:
            _widen_e4m3(v_pages, source, values, target, depth)
        else:
            codes, notes = code_place(v_pages, heads, source // depth, depth // 8 * v_bits, 4)
            load_value(v_bits, codes, notes, depth, values, target)


@helper
def _widen_e4m3(pages, source, numbers, target, depth):
    for d in range(0, depth, LANES):
        store(numbers, target + d, load_e4m3(pages, source + d))


@helper
def _keys_of(state, room, n, span):
    """How many keys of a span and before it, in the span, the n-th query sees."""
    return min(SPAN, max(get_long(state + LENS * room, n) - span, 0))


@helper
def visit(
    k_pages, v_pages, places, apart, depth, span, hidden, at, count, queries, sums, state, room,
    partials, shares,
):  # fmt: skip
    """Keys of a span behind the hidden ones and a panel, or a few queries, from `at` on: how many.

    Neighbouring keys of a page lie `apart` numbers from each other.
    """
    if count <= FEW:
        num, key_step, row_step = min(ROWS, count - at), 1, SPAN
        for n in range(num):
            num_keys = _keys_of(state, room, at + n, span)
            if num_keys > hidden:
                query, own = queries + 4 * (at + n) * depth, state + 4 * (at + n)
                own_shares = shares + 4 * SPAN * n
                _share(k_pages, places, num_keys, hidden, depth, query, own, room, partials, own_shares)
    else:
        key_step, row_step = _panel_of(at, count), 1
        num = min(key_step, count - at)
        _score_panel(
            k_pages, places, apart, depth, span, hidden, at, num, queries, state, room, partials, shares,
            key_step,
        )  # fmt: skip
    _blend(v_pages, places, depth, span, hidden, at, num, sums, state, room, shares, key_step, row_step)
    return num


@helper
def _score_panel(
    k_pages, places, apart, depth, span, hidden, at, num, queries, state, room, partials, shares, width
):  # fmt: skip
    """Shares of a panel's queries, as far as they see keys of a span."""
    lowest, highest = SPAN, 0
    for n in range(at, at + num):
        num_keys = _keys_of(state, room, n, span)
        lowest, highest = min(lowest, num_keys), max(highest, num_keys)
        put(state + ENDS * room, n, f32(num_keys))
    for j in range(0, highest if highest > hidden else 0, KEYS):
        keys = k_pages + 4 * get_long(places, j)
        panel, scores = queries + 4 * at * depth, shares + 4 * j * width
        score_tile(width // LANES, panel, keys, apart, depth, partials, scores)
    edge = lowest < SPAN or hidden > 0
    for n in range(0, width if highest > hidden else 0, LANES):
        _share_panel(highest, hidden, edge, state + 4 * (at + n), room, partials, shares + 4 * n, width)


@helper
def _share_panel(num_keys, hidden, edge, state, room, partials, shares, width):
    """Of 16 queries: scores become shares, with a perhaps higher maximum, and the weight so far.

    At an edge not every query sees all keys. One that sees none keeps what it has, and will see none again.
    """
    high, weight = load(state + HIGHS * room, 0), load(state + WEIGHTS * room, 0)
    end = load(state + ENDS * room, 0)
    nothing, zero, num_keys = splat(f32(-np.inf)), splat(f32(0.0)), -(-num_keys // LANES) * LANES
    if edge:
        for j in range(num_keys):
            score = where_less(splat(f32(j)), end, load(shares, j * width), nothing)
            store(shares, j * width, score if j >= hidden else nothing)
    a, b, c, d = high, high, high, high
    for j in range(0, num_keys, 4):
        a, b = largest(load(shares, j * width), a), largest(load(shares, (j + 1) * width), b)
        c, d = largest(load(shares, (j + 2) * width), c), largest(load(shares, (j + 3) * width), d)
    top = largest(largest(a, b), largest(c, d))
    kept = where_less(nothing, high, exp(sub(high, top)), zero)
    for i in range(LANES):
        chain = zero
        for j in range(i, num_keys, LANES):
            share = exp(sub(load(shares, j * width), top))
            chain = add(chain, share)
            store(shares, j * width, share)
        store(partials, i * LANES, chain)
    half = LANES // 2
    while half > 0:  # the order of simd.total
        for i in range(half):
            store(partials, i * LANES, add(load(partials, i * LANES), load(partials, (i + half) * LANES)))
        half //= 2
    after = add(mul(weight, kept), load(partials, 0))
    store(state + KEPT * room, 0, kept)
    store(state + HIGHS * room, 0, top)
    store(state + WEIGHTS * room, 0, after)


@helper
def _share(k_pages, places, num_keys, hidden, depth, query, state, room, products, shares):
    """The same for one query, from its products with keys on."""
    high = get(state + HIGHS * room, 0)
    nothing = splat(f32(-np.inf))
    highest = nothing
    for j in range(0, num_keys, LANES):
        _multiply(k_pages, places, j, depth, query, products)
        score = first_lanes(sums_of(products, 0), num_keys - j, nothing)
        score = first_lanes(nothing, hidden - j, score)
        highest = largest(score, highest)
        store(shares, j, score)
    top = max(high, peak(highest))
    kept = f32(0.0)
    if high > f32(-np.inf):
        kept = lane(exp(splat(high - top)))
    chains = splat(f32(0.0))
    for j in range(0, num_keys, LANES):
        share = exp(sub(load(shares, j), splat(top)))
        chains = add(chains, share)
        store(shares, j, share)
    put(state + KEPT * room, 0, kept)
    put(state + HIGHS * room, 0, top)
    put(state + WEIGHTS * room, 0, get(state + WEIGHTS * room, 0) * kept + total(chains))


@helper
def _blend(v_pages, places, depth, span, hidden, at, num, sums, state, room, shares, key_step, row_step):
    """Outputs so far of `num` queries from `at` on, and the shares of the values that each of them sees."""
    for n in range(0, num, ROWS):
        rows, common, most = min(ROWS, num - n), SPAN, 0
        for i in range(n, n + rows):
            num_keys = _keys_of(state, room, at + i, span)
            common, most = min(common, num_keys), max(most, num_keys)
        for i in range(n - 1, n + rows if most > max(common, hidden) else n):  # all together, then each alone
            together = i < n
            begin = hidden if together else max(common, hidden)
            end = common if together else _keys_of(state, room, at + i, span)
            if end > begin:
                row = n if together else i
                kept = KEPT if begin == hidden else ONES
                own, to = shares + 4 * (begin * key_step + row * row_step), sums + 4 * (at + row) * depth
                _add(
                    rows if together else 1, end - begin, own, key_step, row_step, v_pages,
                    places + 8 * begin, depth, state + kept * room + 4 * (at + row), to,
                )  # fmt: skip


@helper
def _add(rows, num_keys, shares, key_step, row_step, v_pages, places, depth, kept, sums):
    """What is kept of the outputs of `rows` queries, and shares of as many values as there are places."""
    d = 0
    while d < depth:
        vectors = WIDEST[rows] if depth - d >= LANES * WIDEST[rows] else 1
        output_tile(
            rows, vectors, shares, key_step, row_step, v_pages + 4 * d, places, num_keys,
            kept, sums + 4 * d, depth,
        )  # fmt: skip
        d += LANES * vectors


@inlined
def _multiply(k_pages, places, j, depth, query, products):
    """A vector for each of 16 keys from j on: its products with the query, whose sum is the score."""
    wide = depth // SPAN * SPAN
    for d in range(0, wide, SPAN):
        q0, q1 = load(query, d), load(query, d + 16)
        q2, q3 = load(query, d + 32), load(query, d + 48)
        for i in range(LANES):
            at, to = get_long(places, j + i) + d, i * LANES
            value = load(k_pages, at)
            sum_ = mul(value, q0) if d == 0 else fma(value, q0, load(products, to))
            sum_ = fma(load(k_pages, at + 32), q2, fma(load(k_pages, at + 16), q1, sum_))
            store(products, to, fma(load(k_pages, at + 48), q3, sum_))
        settle()
    for d in range(wide, depth, LANES):
        q0 = load(query, d)
        for i in range(LANES):
            value, to = load(k_pages, get_long(places, j + i) + d), i * LANES
            store(products, to, mul(value, q0) if d == 0 else fma(value, q0, load(products, to)))
        settle()
