"""The gated delta rule's kernels: see cuda.py. What needs no state is in weights.py."""

import triton
import triton.language as tl

from hemiola.plugins.delta.few import keep_behind, stay, walk
from hemiola.plugins.delta.tiles import ask, fold, keep_head, keep_values
from hemiola.plugins.delta.weights import line_of, lines_of, solve, store_fold
from hemiola.plugins.gpu.recurrences import ages, chunk_of, chunks_of_kind
from hemiola.plugins.gpu.rows import (
    LONG,
    PASSES,
    STAYS,
    clear_dead_tokens,
    kind_of,
    load_row,
    passing_first,
    rows_of_kind,
)


@triton.jit(do_not_specialize=["clears", "shares", "num_rows", "num_tokens"])
def _weigh(
    q, k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, rows, o,
    query, mixed, keys, solved_keys, solved_values, totals, order,
    clears, shares, num_rows, num_tokens, ring_len, q_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    # Grid: programs that clear dead tokens, the first of which orders rows if ORDERED, `shares` programs that
    # share out chunk and head of the rows whose edge does not stay, then one per head of each other row.
    # Tile: k, q and v of one chunk.
    # Traffic: records and new tokens once; to L2 a query and a mix of values per token, and what chunks fold.
    pid = tl.program_id(0) - clears
    if pid < 0:
        if ORDERED and pid == -clears:
            passing_first(order, rows, num_rows, CHUNK, True)
        clear_dead_tokens(o, rows, num_rows, num_tokens, pid + clears, H * V)
    elif pid >= shares:
        row, h = (pid - shares) // H, (pid - shares) % H
        first, num, drafts, slot, committed, edge, _, _ = load_row(rows, row)
        if (num > 0) & (kind_of(num, drafts, committed, edge, CHUNK) == STAYS):
            solve(
                q, k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, query, mixed,
                h, edge, first, slot, committed, committed + num, ring_len, q_len, k_len, v_len, a_len, b_len,
                H, G, K, V, J, CHUNK, True,
            )  # fmt: skip
    else:
        before = 0
        for base in range(0, num_rows, 64):
            chunks, ends = chunks_of_kind(rows, base, num_rows, PASSES, LONG, CHUNK)
            turn, items = (before + shares - 1 - pid) // shares, tl.sum(chunks, 0) * H
            for item in range(pid + turn * shares - before, items, shares):
                row, chunk = chunk_of(chunks, ends, item // H)
                h = item % H
                first, num, _, slot, committed, edge, _, _ = load_row(rows, base + row)
                start, end = edge + chunk * CHUNK, committed + num
                k_c, v_c, total, inverse = solve(
                    q, k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, query, mixed,
                    h, start, first, slot, committed, end, ring_len, q_len, k_len, v_len, a_len, b_len,
                    H, G, K, V, J, CHUNK, False,
                )  # fmt: skip
                if start + CHUNK <= end:
                    line = lines_of(start, edge, committed, first, base + row, num_tokens, ring_len, CHUNK)
                    store_fold(keys, solved_keys, solved_values, totals, line, h, k_c, v_c, total, inverse,
                               H, G, K, V, J)  # fmt: skip
            before += items


@triton.jit(do_not_specialize=["num_tokens"])
def _step(
    k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o,
    query, mixed, keys, solved_keys, solved_values, totals,
    num_tokens, ring_len, k_len, v_len, a_len, b_len, state_again,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # Grid: one program per row and TILES tiles of its heads, row by row; if ORDERED those first that pass an
    # edge, and `rows` is the table that says so.
    # Tile: state [BV, K] fp32, the next STAGES - 1 on their way; up to 16 new tokens.
    # Traffic: the state once, and the fold of a row that passes an edge.
    blocks: tl.constexpr = (V + BV - 1) // BV
    programs: tl.constexpr = H * blocks // TILES
    row, tile_0 = tl.program_id(0) // programs, tl.program_id(0) % programs * TILES
    place: tl.constexpr = 2 if ORDERED else 1
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, place * row)
    if ORDERED:
        row = tl.load(rows + row * 16 + 8)
    if num > 0:
        kind = kind_of(num, drafts, committed, edge, CHUNK)
        own, token = slot.to(tl.int64) * (H * K * V), first.to(tl.int64)
        if kind == STAYS:
            n, p, t = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, 16)
            held, live = (edge > 0) & (committed > 0), t < num
            inner, of_query = p[:, None] + n[None, :] * V, t[None, :] * (2 * H * K) + n[:, None]
            of_token = t[None, :] * (H * V) + p[:, None]
            for i in tl.range(TILES, num_stages=STAGES):
                h, p0 = (tile_0 + i) // blocks, (tile_0 + i) % blocks * BV
                stored = p < V - p0
                s = tl.load(state + (own + h * (K * V) + p0) + inner, mask=stored[:, None] & held, other=0.0)
                at = query + (token * H + h) * (2 * K)
                high = tl.load(at + of_query, mask=live[None, :], other=0.0)
                low = tl.load(at + K + of_query, mask=live[None, :], other=0.0)
                real, at = live[None, :] & stored[:, None], (token * H + h) * V + p0
                out = ask(s, high, low) + tl.load(mixed + at + of_token, mask=real, other=0.0)
                tl.store(o + at + of_token, out.to(o.dtype.element_ty), mask=real)
                if committed == 0:
                    zero = tl.zeros((BV, K), tl.float32)
                    tl.store(state_again + (own + h * (K * V) + p0) + inner, zero, mask=stored[:, None])
        else:
            if kind == PASSES:
                stages: tl.constexpr = STAGES if STAGES < 2 else 2
                whole: tl.constexpr = TILES if blocks % TILES == 0 else blocks if TILES % blocks == 0 else 1
                part: tl.constexpr = whole if ORDERED else 1
                for tile in tl.range(tile_0, tile_0 + TILES, part, num_stages=1 if part > 1 else stages):
                    _pass(
                        state, state_again, o, query, mixed, keys, solved_keys, solved_values, totals,
                        row, tile // blocks, tile % blocks * BV, first, num, drafts, slot, committed, edge,
                        snapshot, snapshot_edge, num_tokens, ring_len, H, G, K, V, J, CHUNK, BV, part, stages,
                    )  # fmt: skip
            _keep(k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tile_0, first,
                  drafts, slot, committed, committed + num, ring_len, k_len, v_len, a_len, b_len,
                  H, G, K, V, J, CHUNK, BV, TILES)  # fmt: skip


@triton.jit(do_not_specialize=["clears", "num_rows", "num_tokens"])
def _few(
    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o, tickets,
    clears, num_rows, num_tokens, ring_len, q_len, k_len, v_len, a_len, b_len, state_again,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # Grid: programs that clear dead tokens, then one per row and TILES tiles of one of its heads.
    # Tile: state [BV, K] fp32 in registers; k, q and v of one chunk.
    # Traffic: the state once; records and new tokens for each program.
    blocks: tl.constexpr = (V + BV - 1) // BV
    programs: tl.constexpr = H * blocks // TILES
    pid = tl.program_id(0) - clears
    if pid < 0:
        clear_dead_tokens(o, rows, num_rows, num_tokens, pid + clears, H * V)
    else:
        row, tile = pid // programs, pid % programs * TILES
        h, p0 = tile // blocks, tile % blocks * BV
        first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
        end = committed + num
        if num > 0:
            if (end <= edge + CHUNK) & (end - drafts < edge + CHUNK):
                stay(
                    q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, o,
                    h, p0, first, slot, committed, edge, end, ring_len, q_len, k_len, v_len, a_len, b_len,
                    state_again, H, G, K, V, J, CHUNK, BV, TILES,
                )  # fmt: skip
            else:
                for i in range(TILES):
                    walk(
                        q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, o,
                        h, p0 + i * BV, first, drafts, slot, committed, edge, snapshot, snapshot_edge, end,
                        ring_len, q_len, k_len, v_len, a_len, b_len, state_again, H, G, K, V, J, CHUNK, BV,
                    )  # fmt: skip
                keep_behind(
                    k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tickets, h, p0,
                    first, drafts, slot, committed, edge, end, ring_len, k_len, v_len, a_len, b_len,
                    H, G, K, V, J, CHUNK, BV, TILES,
                )  # fmt: skip


@triton.jit
def _pass(
    state, state_again, o, query, mixed, keys, solved_keys, solved_values, totals,
    row, h, start, first, num, drafts, slot, committed, edge, snapshot, snapshot_edge, num_tokens, ring_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of a head: outputs before and behind the next edge, and the state there."""
    end, token = committed + num, first.to(tl.int64)
    n, p, t = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, 16)
    inner, live = p[:, None] + n[None, :] * V, t < num
    line = lines_of(edge, edge, committed, first, row, num_tokens, ring_len, CHUNK)
    if TILES > 1:
        high, low = _queries(query, token, h, num, H, K)
        solved_high, solved_low, gain, decay, k_c = _solved(keys, solved_keys, totals, line, h, H, G, K, J)
    for i in tl.range(TILES, num_stages=STAGES):
        p0 = start + i * BV
        stored, at = p < V - p0, h * V + p0
        own = slot.to(tl.int64) * (H * K * V) + h * (K * V) + p0
        s = tl.load(state + own + inner, mask=stored[:, None] & (edge > 0) & (committed > 0), other=0.0)
        if TILES == 1:
            high, low = _queries(query, token, h, num, H, K)
        to = token * (H * V) + at + (t[None, :] * (H * V) + p[:, None])
        real, of_values = live[None, :] & stored[:, None], line[None, :] * (H * V) + (at + p[:, None])
        m = tl.load(mixed + to, mask=real, other=0.0)
        before = ask(s, high, low)
        if TILES == 1:
            solved_high, solved_low, gain, decay, k_c = _solved(
                keys, solved_keys, totals, line, h, H, G, K, J
            )
        values = tl.load(solved_values + of_values, mask=stored[:, None], other=0.0)
        s = fold(s, values - ask(s, solved_high, solved_low), k_c, gain, decay, J)
        out = tl.where((committed + t < edge + CHUNK)[None, :], before, ask(s, high, low)) + m
        tl.store(o + to, out.to(o.dtype.element_ty), mask=real)
        if end - drafts >= edge + CHUNK:
            tl.store(state_again + own + inner, s, mask=stored[:, None])
            if (snapshot != 0) & (snapshot_edge == edge + CHUNK):
                other = snapshot.to(tl.int64) * (H * K * V) + h * (K * V) + p0
                tl.store(state_again + other + inner, s, mask=stored[:, None])
        elif committed == 0:
            tl.store(state_again + own + inner, tl.zeros((BV, K), tl.float32), mask=stored[:, None])


@triton.jit
def _queries(query, token, h, num, H: tl.constexpr, K: tl.constexpr):
    """A head's queries [K, 16], in two halves."""
    n, t = tl.arange(0, K), tl.arange(0, 16)
    asked = query + (token * H + h) * (2 * K) + (t[None, :] * (2 * H * K) + n[:, None])
    high = tl.load(asked, mask=(t < num)[None, :], other=0.0)
    return high, tl.load(asked + K, mask=(t < num)[None, :], other=0.0)


@triton.jit
def _solved(
    keys, solved_keys, totals, line, h, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, J: tl.constexpr
):
    """What a chunk does to all tiles of a head: solved keys in two halves, gain, decay, keys."""
    n = tl.arange(0, K)
    solved = solved_keys + line[None, :] * (2 * H * K) + (h * (2 * K) + n[:, None])
    high, low = tl.load(solved), tl.load(solved + K)
    gain, decay = _fading(totals, line, h, True, H, K, J)
    k_c = tl.load(keys + line[:, None] * (G * K) + (h // (H // G) * K + n[None, :]))
    return high, low, gain, decay, k_c


@triton.jit
def _fading(totals, line, h, folds, H: tl.constexpr, K: tl.constexpr, J: tl.constexpr):
    """What the chunk's end keeps of its tokens, exp(G_C - G), and of the state before, exp(G_C)."""
    ends = tl.arange(0, line.shape[0]) == line.shape[0] - 1
    if J == 1:
        total = tl.load(totals + line * H + h, mask=folds, other=0.0)
        last = tl.sum(tl.where(ends, total, 0.0), 0)
    else:
        of_total = line[:, None] * (H * K) + (h * K + tl.arange(0, K)[None, :])
        total = tl.load(totals + of_total, mask=folds, other=0.0)
        last = tl.sum(tl.where(ends[:, None], total, 0.0), 0)[None, :]
    return tl.exp(last - total), tl.exp(last)


@triton.jit
def _brought(
    keys, solved_values, line, h, p0, folds,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The chunk's keys, and T v of BV channels."""
    n, p = tl.arange(0, K), tl.arange(0, BV)
    k_c = tl.load(keys + line[:, None] * (G * K) + (h // (H // G) * K + n[None, :]), mask=folds, other=0.0)
    of_values = line[None, :] * (H * V) + (h * V + p0 + p[:, None])
    return k_c, tl.load(solved_values + of_values, mask=(p < V - p0)[:, None] & folds, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _scan(
    state, rows, o, query, mixed, keys, solved_keys, solved_values, totals, order,
    num_rows, num_tokens, ring_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # Grid: programs that share out row, head and BV channels of the rows of many tokens.
    # Tile: state [BV, K] fp32 in registers from the row's edge to its last token, CHUNK tokens beside it.
    # Traffic: the state at its ends; per token and head a query, a key, two lines of values, and o.
    blocks: tl.constexpr = (V + BV - 1) // BV
    before, programs = 0, tl.num_programs(0)
    if ORDERED:
        num_rows = tl.where(tl.load(order + 9) > 0, num_rows, 0)
    for base in range(0, num_rows, 64):
        row, mine, rank, count = rows_of_kind(rows, base, num_rows, LONG, LONG, CHUNK)
        turn = (before + programs - 1 - tl.program_id(0)) // programs  # items go round all blocks of rows
        for item in range(tl.program_id(0) + turn * programs, before + count * H * blocks, programs):
            inside = item - before
            found = tl.sum(tl.where(mine & (rank == inside // (H * blocks)), row, 0), 0)
            _scan_row(
                state, rows, o, query, mixed, keys, solved_keys, solved_values, totals,
                found, inside // blocks % H, inside % blocks * BV, num_tokens, ring_len,
                H, G, K, V, J, CHUNK, BV, STAGES,
            )  # fmt: skip
        before += count * H * blocks


@triton.jit
def _scan_row(
    state, rows, o, query, mixed, keys, solved_keys, solved_values, totals, row, h, p0, num_tokens, ring_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head's BV channels from the row's edge to its last token, chunk after chunk."""
    first, num, drafts, slot, committed, edge, snapshot, snapshot_edge = load_row(rows, row)
    at, end, new_edge = h * V + p0, committed + num, (committed + num - drafts) // CHUNK * CHUNK
    n, p, c = tl.arange(0, K), tl.arange(0, BV), tl.arange(0, CHUNK)
    stored, inner = p < V - p0, p[:, None] + n[None, :] * V
    own = state + (slot.to(tl.int64) * (H * K * V) + h * (K * V) + p0)
    other = state + (snapshot.to(tl.int64) * (H * K * V) + h * (K * V) + p0)
    s = tl.load(own + inner, mask=stored[:, None] & (edge > 0) & (committed > 0), other=0.0)
    if (new_edge == 0) & (committed == 0):
        tl.store(own + inner, s, mask=stored[:, None])
    both = tl.arange(0, 2 * CHUNK)  # a chunk's queries, then its solved keys
    is_query, of_both = both < CHUNK, both[None, :] % CHUNK * (2 * H * K) + n[:, None]
    of_token = c[None, :] * (H * V) + p[:, None]
    for start in tl.range(edge, end, CHUNK, num_stages=STAGES):
        token, folds = (
            (first + start - committed).to(tl.int64),
            (start + CHUNK <= new_edge) | (start + CHUNK < end),
        )
        line = line_of(start, edge, committed, first, row, num_tokens, ring_len, CHUNK)
        _, new = ages(start + c, committed, end)
        _, new_query = ages(start + both, committed, end)
        asks = tl.where(is_query, new_query, folds)[None, :]
        of_query, of_key = query + (token * H + h) * (2 * K), solved_keys + (line * H + h) * (2 * K)
        asked = tl.where(is_query, of_query, of_key)[None, :] + of_both
        high, low = tl.load(asked, mask=asks, other=0.0), tl.load(asked + K, mask=asks, other=0.0)
        to, real = token * (H * V) + at + of_token, new[None, :] & stored[:, None]
        m = tl.load(mixed + to, mask=real, other=0.0)
        gain, decay = _fading(totals, line + c, h, folds, H, K, J)
        k_c, values = _brought(keys, solved_values, line + c, h, p0, folds, H, G, K, V, BV)
        out, erased = tl.split(tl.permute(tl.reshape(ask(s, high, low), (BV, 2, CHUNK)), (0, 2, 1)))
        tl.store(o + to, (out + m).to(o.dtype.element_ty), mask=real)
        s = fold(s, values - erased, k_c, gain, decay, J)
        if start + CHUNK == new_edge:
            tl.store(own + inner, s, mask=stored[:, None])
        if (snapshot != 0) & (start + CHUNK == snapshot_edge) & (snapshot_edge <= new_edge):
            tl.store(other + inner, s, mask=stored[:, None])


@triton.jit
def _keep(
    k, v, a, b, dt_bias, A, k_records, v_records, g_records, beta_records, tile_0, first, drafts, slot,
    committed, end, ring_len, k_len, v_len, a_len, b_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, CHUNK: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """New tokens behind the new edge to the ring: v of these tiles, gates of heads, k of groups."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    low, base = tl.maximum(committed, (end - drafts) // CHUNK * CHUNK), slot.to(tl.int64) * ring_len
    for start in range(low, end, 16):
        token = (first + start - committed).to(tl.int64)
        for tile in range(tile_0, tile_0 + TILES):
            h, p0 = tile // blocks, tile % blocks * BV
            keep_values(v, v_records, h, p0, start, end, token, base, ring_len, v_len, H, V, BV)
            if p0 == 0:
                keep_head(k, a, b, dt_bias, A, k_records, g_records, beta_records, h, start, end, token, base,
                          ring_len, k_len, a_len, b_len, H, G, K, J)  # fmt: skip
