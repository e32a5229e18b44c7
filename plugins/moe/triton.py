"""A mixture of experts on CUDA: pairs of token and expert in groups, a chain per output, slots in order.

Pairs are sorted by expert on the device, and every group is cut into tiles; programs for tiles that are not
needed end at once, so that nothing waits for a count. In which tile a pair lies never changes its bits.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.codes import coded_chain
from hemiola.plugins.gpu.dense import activate, chain, place_of, row_of
from hemiola.plugins.gpu.e4m3 import apart, e4m3_chain, round_line


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort(expert_ids, pairs, tiles, num_pairs, num_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr,
          TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # Grid: experts; each finds its pairs, in order, and where they stand behind those of lower experts.
    # Tile: BLOCK pairs at a time, read twice.
    # Traffic: E * P ids read (from L2), P pairs and the tiles written.
    expert = tl.program_id(0)
    lane, bin_ = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        id_, known = _ids_of(expert_ids, first + lane, num_pairs, EXPERTS)
        counts += tl.histogram(tl.where(known, id_, 0), BINS, mask=known)
    size = tl.sum(tl.where(bin_ == expert, counts, 0), axis=0)
    place = tl.sum(tl.where(bin_ < expert, counts, 0), axis=0)
    num_before = tl.sum(tl.where(bin_ < expert, (counts + TOKENS - 1) // TOKENS, 0), axis=0)
    end = place + size
    num_mine = (size + TOKENS - 1) // TOKENS
    for i in range(num_mine):
        _write_tile(tiles, num_before + i, expert, place + i * TOKENS, end)
    if expert == EXPERTS - 1:
        for i in range(num_before + num_mine, num_tiles):
            _write_tile(tiles, i, -1, 0, 0)
        tl.store(tiles + num_tiles * 4, num_before + num_mine)
    for first in range(0, num_pairs, BLOCK):
        id_ = tl.load(expert_ids + first + lane, mask=first + lane < num_pairs, other=-1)
        mine = (id_ == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(mine, axis=0) - 1, first + lane, mask=mine != 0)
        place += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(expert_ids, counts, num_pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    # Grid: blocks of pairs; with _place what _sort does, for many.
    # Tile: BLOCK pairs.
    # Traffic: P ids read, a block's pairs of each expert written.
    id_, known = _ids_of(expert_ids, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), num_pairs, EXPERTS)
    found = tl.histogram(tl.where(known, id_, 0), BINS, mask=known)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place(expert_ids, counts, pairs, tiles, num_pairs, num_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr,
           TOKENS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    # Grid: blocks of pairs.
    # Tile: BLOCK pairs, compared with EACH others at a time; EACH blocks' counts; EACH lines of `tiles`.
    # Traffic: all counts (from L2), P ids read, P pairs and the tiles written.
    block, num_blocks, each = tl.program_id(0), tl.num_programs(0), tl.arange(0, EACH)
    bin_, lane = tl.arange(0, BINS), tl.arange(0, BLOCK)
    size, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, EACH):
        other = (first + each)[:, None]
        found = tl.load(counts + other * BINS + bin_[None, :], mask=other < num_blocks, other=0)
        size += tl.sum(found, axis=0)
        before += tl.sum(tl.where(other < block, found, 0), axis=0)
    end = tl.cumsum(size, axis=0)
    id_, known = _ids_of(expert_ids, block * BLOCK + lane, num_pairs, EXPERTS)
    place = tl.gather(end - size + before, tl.where(known, id_, 0), axis=0)
    for first in range(0, BLOCK, EACH):
        other = tl.load(expert_ids + block * BLOCK + first + each,
                        mask=block * BLOCK + first + each < num_pairs, other=-1)  # fmt: skip
        is_before = (other[None, :] == id_[:, None]) & ((first + each)[None, :] < lane[:, None])
        place += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(pairs + place, block * BLOCK + lane, mask=known)
    num_mine = (size + TOKENS - 1) // TOKENS
    last = tl.cumsum(num_mine, axis=0)
    num_all = tl.sum(num_mine, axis=0)
    for first in range(block * EACH, num_tiles, num_blocks * EACH):
        tile = first + each
        is_there = tile < num_all
        expert = tl.where(is_there, tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1), 0)
        at = (
            tl.gather(end - size, expert, axis=0)
            + (tile - tl.gather(last - num_mine, expert, axis=0)) * TOKENS
        )
        line = tiles + tile * 4
        tl.store(line, tl.where(is_there, expert, -1), mask=tile < num_tiles)
        tl.store(line + 1, tl.where(is_there, at, 0), mask=tile < num_tiles)
        tl.store(line + 2, tl.where(is_there, tl.gather(end, expert, axis=0), 0), mask=tile < num_tiles)
    if block == 0:
        tl.store(tiles + num_tiles * 4, num_all)


@triton.jit
def _ids_of(expert_ids, pair, num_pairs, EXPERTS: tl.constexpr):
    """The experts of pairs, and which of them there are."""
    id_ = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
    return id_, (id_ >= 0) & (id_ < EXPERTS)


@triton.jit
def _write_tile(tiles, tile, expert, first, end):
    tl.store(tiles + tile * 4, expert)
    tl.store(tiles + tile * 4 + 1, first)
    tl.store(tiles + tile * 4 + 2, end)


@triton.jit
def _experts(x, weight, y, pairs, tiles, expert_weights, num_outputs, num_inputs, x_len, y_len,
             SLOTS: tl.constexpr, IS_UP: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
             TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
             ACTIVATION: tl.constexpr):  # fmt: skip
    # Grid: tiles of pairs x tiles of outputs, neighbours in the same expert's weights.
    # Tile: [TOKENS, OUTPUTS] of one expert, the whole inner dimension.
    # Traffic: an expert's weights once per tile of its pairs (from L2 but for the first), x per output tile.
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    place, pair, inside = _pairs_of(tile, pairs, tiles, TOKENS)
    x_lines = x + (pair // SLOTS if IS_UP else place) * x_len
    first_output = tl.program_id(1) * OUTPUTS
    row = row_of(first_output, num_outputs, OUTPUTS, ACTIVATION).to(tl.int64)
    weight_lines = weight + (expert * num_outputs + row) * num_inputs
    total = chain(x_lines, inside, weight_lines, num_inputs, WHOLE, WEIGHT_FIRST, TOKENS, OUTPUTS, INNER)
    _leave(total, y, expert_weights, place, pair, inside, first_output, num_outputs, y_len, IS_UP, DTYPE,
           OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit
def _coded_experts(x, words, scales, zeros, factors, y, pairs, tiles, expert_weights, num_outputs, num_inputs,
                   words_len, scales_len, zeros_len, factors_len, x_len, y_len, KIND: tl.constexpr,
                   HALF: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
                   DIVIDES: tl.constexpr, BLOCKS: tl.constexpr, ABREAST: tl.constexpr, WHOLE: tl.constexpr,
                   SLOTS: tl.constexpr, IS_UP: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
                   OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    # Grid, tile: those of _experts.
    # Traffic: an expert's codes once per tile of its pairs (from L2 but for the first), x per output tile.
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    place, pair, inside = _pairs_of(tile, pairs, tiles, TOKENS)
    x_lines = x + (pair // SLOTS if IS_UP else place) * x_len
    first_output = tl.program_id(1) * OUTPUTS
    row = row_of(first_output, num_outputs, OUTPUTS, ACTIVATION)
    total = coded_chain(x_lines, inside, words + expert * words_len, scales + expert * scales_len,
                        zeros + expert * zeros_len, factors + expert * factors_len, row, num_inputs, KIND,
                        HALF, STEP, SCALED, ZEROS, DIVIDES, WHOLE, DTYPE, TOKENS, OUTPUTS, BLOCKS,
                        ABREAST)  # fmt: skip
    _leave(tl.trans(total), y, expert_weights, place, pair, inside, first_output, num_outputs, y_len, IS_UP,
           DTYPE, OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _round_pairs(x, static, static_len, expert_ids, pairs, codes, scales, num_inputs, width, x_len, num_pairs,
                 num_experts, SLOTS: tl.constexpr, IS_UP: tl.constexpr, BY: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    # Grid: pairs, in their order; behind the last one that has an expert programs end at once.
    # Tile: BLOCK inputs of a pair at a time; with a scale for the row all of them twice.
    # Traffic: tokens once for each of their pairs (from L2 but once), as many bytes of codes.
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs + place).to(tl.int64)
    if (pair < 0) | (pair >= num_pairs):
        return
    expert = tl.load(expert_ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    line = x + (pair // SLOTS if IS_UP else place) * x_len
    round_line(line, num_inputs, static + expert * static_len, codes + place * width,
               scales + place, apart(num_pairs), width, BY, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _e4m3_experts(codes, by, weight, scales, y, pairs, tiles, expert_weights, num_outputs, width, span,
                  num_pairs, weight_len, scales_len, y_len, BY_GROUP: tl.constexpr, SLOTS: tl.constexpr,
                  IS_UP: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
                  ACTIVATION: tl.constexpr):  # fmt: skip
    # Grid, tile: those of _experts.
    # Traffic: an expert's codes once per tile of its pairs (from L2 but once), inputs per output tile.
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    place, pair, inside = _pairs_of(tile, pairs, tiles, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    row = row_of(first_output, num_outputs, OUTPUTS, ACTIVATION)
    total = e4m3_chain(codes + place * width, by + place, apart(num_pairs), inside,
                       weight + expert * weight_len, scales + expert * scales_len, row, num_outputs, width,
                       span, BY_GROUP, TOKENS, OUTPUTS)  # fmt: skip
    _leave(tl.trans(total), y, expert_weights, place, pair, inside, first_output, num_outputs, y_len, IS_UP,
           DTYPE, OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit
def _pairs_of(tile, pairs, tiles, TOKENS: tl.constexpr):
    """Places of a tile's pairs in their order, the pairs, and which of them there are."""
    first, end = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    place = first + tl.arange(0, TOKENS)
    inside = place < end
    place = tl.minimum(place, end - 1).to(tl.int64)
    return place, tl.load(pairs + place).to(tl.int64), inside


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_persistent(x, weight, y, pairs, tiles, expert_weights, num_outputs, num_inputs, num_tiles, y_len,
                        SLOTS: tl.constexpr, IS_UP: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
                        OUTPUTS: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
                        GROUP: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x (in the order of pairs) and weight are
    # descriptors.
    # Tile: [TOKENS, OUTPUTS] of one expert, the whole inner dimension.
    # Traffic: an expert's weights once per group of tiles, x once per output tile, mostly from L2; y once.
    num_real, num_output_tiles = tl.load(tiles + num_tiles * 4), tl.cdiv(num_outputs, OUTPUTS)
    for step in tl.range(tl.program_id(0), num_real * num_output_tiles, tl.num_programs(0), flatten=True):
        output_tile, tile = place_of(step, num_output_tiles, num_real, GROUP)
        expert, first = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        first_output = output_tile * OUTPUTS
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, num_inputs, INNER):
            a = x.load([first, start])
            b = tl.reshape(weight.load([expert * HALVES, first_output // HALVES, start]), (OUTPUTS, INNER))
            total = tl.dot(a, b.T, total)
        end = tl.load(tiles + tile * 4 + 2)
        place = first + tl.arange(0, TOKENS)
        inside = place < end
        pair = tl.load(pairs + place, mask=inside, other=0).to(tl.int64)
        _leave(total, y, expert_weights, place.to(tl.int64), pair, inside, first_output, num_outputs, y_len,
               IS_UP, DTYPE, OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit
def _leave(total, y, expert_weights, place, pair, inside, first_output, num_outputs, y_len,
           IS_UP: tl.constexpr, DTYPE: tl.constexpr, OUTPUTS: tl.constexpr,
           ACTIVATION: tl.constexpr):  # fmt: skip
    """Stores a tile: after the activation in the order of pairs, or weighed where its tokens' slots are."""
    total = activate(total, ACTIVATION)
    halved: tl.constexpr = OUTPUTS // total.shape[1]
    column = first_output // halved + tl.arange(0, OUTPUTS // halved)
    if not IS_UP:
        total = total * tl.load(expert_weights + pair, mask=inside, other=0.0)[:, None]
    lines = y + (place if IS_UP else pair) * y_len
    mask = inside[:, None] & (column < num_outputs // halved)[None, :]
    tl.store(lines[:, None] + column[None, :], total.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _copy_lines(x, pairs, lines, num_tokens, width, x_len, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: pairs x blocks of channels.
    # Tile: BLOCK channels of one pair's token.
    # Traffic: P * F elements read (tokens from L2 but once), as many written.
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(pairs + place).to(tl.int64) // SLOTS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width) & (token >= 0) & (token < num_tokens)
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0)
    tl.store(lines + place * width + at, value, mask=at < width)


@triton.jit
def _combine(out, expert_ids, y, width, num_experts, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of one token, slot after slot.
    # Traffic: T * K * F elements read, T * F written.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(expert_ids + pair)
        known = (expert >= 0) & (expert < num_experts)
        total += tl.load(out + pair * width + at, mask=(at < width) & known, other=0.0).to(tl.float32)
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=at < width)
