"""The dense layer on CUDA: one chain of sums per output, in tiles of any shape, and what may end it."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import relu2
from hemiola.plugins.gpu.codes import coded_chain, unpack, wait_for_words
from hemiola.plugins.gpu.dense import best_of, chain, halves, open_eights, place_of
from hemiola.plugins.gpu.e4m3 import apart, e4m3_chain, round_line
from hemiola.plugins.gpu.early import wait


@triton.jit(do_not_specialize=["num_tokens"])
def _tiles(x, weight, bias, residual, best, y, num_tokens, num_outputs, num_inputs, x_len, weight_len,
           residual_len, y_len, WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
           OUTPUTS: tl.constexpr, INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
           BIASED: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    # Grid: token tiles x output tiles, neighbours in the same weights.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: the weights once per token tile, x once per output tile (from L2), y once.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    row = _rows(first_output, num_outputs, OUTPUTS).to(tl.int64)
    x_lines = x + token * x_len
    weight_lines = weight + row * weight_len
    wait(weight_lines, EARLY)
    total = chain(x_lines, token < num_tokens, weight_lines, num_inputs, WHOLE, WEIGHT_FIRST, TOKENS, OUTPUTS,
                  INNER)  # fmt: skip
    _leave(total, bias, residual, best, y, token, row, first_output, num_tokens, num_outputs, residual_len,
           y_len, DTYPE, OUTPUTS, ACTIVATION, BIASED, ADDS)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _coded(x, words, scales, zeros, factors, bias, residual, best, y, num_tokens, num_outputs, num_inputs,
           x_len, residual_len, y_len, KIND: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
           SCALED: tl.constexpr, ZEROS: tl.constexpr, DIVIDES: tl.constexpr, BLOCKS: tl.constexpr,
           ABREAST: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
           OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    # Grid: token tiles x output tiles, neighbours in the same codes.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: codes and scales once per token tile, x once per output tile (from L2), y once.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    row = _rows(first_output, num_outputs, OUTPUTS)
    wait_for_words(words, first_output, num_outputs, num_inputs, KIND, HALF, OUTPUTS, EARLY)
    total = coded_chain(x + token * x_len, token < num_tokens, words, scales, zeros, factors, row, num_inputs,
                        KIND, HALF, STEP, SCALED, ZEROS, DIVIDES, WHOLE, DTYPE, TOKENS, OUTPUTS, BLOCKS,
                        ABREAST)  # fmt: skip
    _leave(tl.trans(total), bias, residual, best, y, token, row.to(tl.int64), first_output, num_tokens,
           num_outputs, residual_len, y_len, DTYPE, OUTPUTS, ACTIVATION, BIASED, ADDS)  # fmt: skip


@triton.jit
def _unpack(words, scales, zeros, weight, num_outputs, num_blocks, KIND: tl.constexpr, HALF: tl.constexpr,
            STEP: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    # Grid: slabs of outputs x blocks of inputs.
    # Tile: 16 outputs, BLOCKS blocks.
    # Traffic: codes and scales once, two bytes for each.
    unpack(words, scales, zeros, weight, tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS),
           num_outputs, num_blocks, KIND, HALF, STEP, SCALED, ZEROS)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _round(x, static, codes, scales, num_inputs, width, num_rows, x_len, BY: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    # Grid: rows.
    # Tile: BLOCK inputs of a row at a time; with a scale for the row all of them twice.
    # Traffic: x once (and from L2), as many bytes of codes.
    row = tl.program_id(0).to(tl.int64)
    round_line(x + row * x_len, num_inputs, static, codes + row * width, scales + row, num_rows, width, BY,
               BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _e4m3(codes, by, weight, scales, bias, residual, best, y, num_tokens, num_outputs, width, span,
          residual_len, y_len, BY_GROUP: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
          OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
          ADDS: tl.constexpr):  # fmt: skip
    # Grid: token tiles x output tiles, neighbours in the same codes.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: the weights once per token tile, inputs once per output tile (from L2), y once.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    row = _rows(first_output, num_outputs, OUTPUTS)
    total = e4m3_chain(codes + token * width, by + token, apart(num_tokens), token < num_tokens, weight,
                       scales, row, num_outputs, width, span, BY_GROUP, TOKENS, OUTPUTS)  # fmt: skip
    _leave(tl.trans(total), bias, residual, best, y, token, row.to(tl.int64), first_output, num_tokens,
           num_outputs, residual_len, y_len, DTYPE, OUTPUTS, ACTIVATION, BIASED, ADDS)  # fmt: skip


@triton.jit
def _leave(total, bias, residual, best, y, token, row, first_output, num_tokens, num_outputs, residual_len,
           y_len, DTYPE: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
           BIASED: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    """What ends a tile [TOKENS, OUTPUTS], and its place."""
    total = _end(total, bias, row, ACTIVATION, BIASED)
    if ACTIVATION == "argmax":
        _store_best(total, y, best, token, first_output, num_tokens, num_outputs, DTYPE, OUTPUTS)
    else:
        halved: tl.constexpr = OUTPUTS // total.shape[1]
        column = first_output // halved + tl.arange(0, OUTPUTS // halved)
        inside = (token < num_tokens)[:, None] & (column < num_outputs // halved)[None, :]
        if ADDS:
            line = residual + token[:, None] * residual_len + column[None, :]
            total += tl.load(line, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + token[:, None] * y_len + column[None, :], total.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _persistent(x, weight, weight_start, bias, residual, best, y, num_tokens, num_outputs, num_inputs,
                weight_len, GROUP: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
                TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
                ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
                EARLY: tl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, weight, residual and y are descriptors.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: x once per output tile and weights once per token tile, mostly from L2; y once.
    num_output_tiles, num_token_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_tokens, TOKENS)
    num_tiles = num_output_tiles * num_token_tiles
    output_tile, _ = place_of(tl.program_id(0), num_output_tiles, num_token_tiles, GROUP)
    row = _rows(output_tile * OUTPUTS, num_outputs, OUTPUTS).to(tl.int64)
    wait(weight_start + row * weight_len, EARLY)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, first_output = token_tile * TOKENS, output_tile * OUTPUTS
        if WEIGHT_FIRST:
            total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        else:
            total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, num_inputs, INNER):
            a = x.load([first_token, start])
            b = weight.load([first_output, start])
            total = tl.dot(b, a.T, total) if WEIGHT_FIRST else tl.dot(a, b.T, total)
        if WEIGHT_FIRST:
            total = total.T
        total = _end(total, bias, _rows(first_output, num_outputs, OUTPUTS), ACTIVATION, BIASED)
        if ACTIVATION == "argmax":
            token = first_token.to(tl.int64) + tl.arange(0, TOKENS)
            _store_best(total, y, best, token, first_output, num_tokens, num_outputs, DTYPE, OUTPUTS)
        else:
            _store_parts(total, residual, y, first_token, first_output, PARTS, DTYPE, OUTPUTS, ADDS)


@triton.jit
def _rows(first_output, num_outputs, OUTPUTS: tl.constexpr):
    """The weight's row of every output of a tile."""
    return tl.minimum(first_output + tl.arange(0, OUTPUTS), num_outputs - 1)


@triton.jit
def _end(total, bias, row, ACTIVATION: tl.constexpr, BIASED: tl.constexpr):
    """A tile after bias and activation."""
    if BIASED:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    if ACTIVATION == "relu2":
        return relu2(total)
    elif ACTIVATION == "swiglu":
        return open_eights(total)
    else:
        return total


@triton.jit
def _store_parts(total, residual, y, first_token, first_output, PARTS: tl.constexpr, DTYPE: tl.constexpr,
                 OUTPUTS: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    """Stores a tile through y's descriptor, in one or two parts."""
    first_column = first_output // (OUTPUTS // total.shape[1])
    if PARTS == 2:
        left, right = halves(total)
        _store_part(left, residual, y, first_token, first_column, DTYPE, ADDS)
        _store_part(right, residual, y, first_token, first_column + total.shape[1] // 2, DTYPE, ADDS)
    else:
        _store_part(total, residual, y, first_token, first_column, DTYPE, ADDS)


@triton.jit
def _store_part(total, residual, y, first_token, first_column, DTYPE: tl.constexpr, ADDS: tl.constexpr):
    if ADDS:
        total += residual.load([first_token, first_column]).to(tl.float32)
    y.store([first_token, first_column], total.to(DTYPE))


@triton.jit
def _store_best(total, values, outputs, token, first_output, num_tokens, num_outputs, DTYPE: tl.constexpr,
                OUTPUTS: tl.constexpr):  # fmt: skip
    """Stores a tile's best outputs and their values, [output tiles, T]."""
    value, first = best_of(total, first_output, num_outputs, DTYPE)
    at = (first_output // OUTPUTS).to(tl.int64) * num_tokens + token
    tl.store(values + at, value, mask=token < num_tokens)
    tl.store(outputs + at, first, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _best_part(values, outputs, best, best_value, num_tokens, num_parts, BLOCK: tl.constexpr):
    # Grid: tokens.
    # Tile: BLOCK output tiles of one token at a time.
    # Traffic: the best value and output of every tile once.
    token = tl.program_id(0).to(tl.int64)
    value, output = float("-inf"), 2147483647
    for first in range(0, num_parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = part.to(tl.int64) * num_tokens + token
        mine = tl.load(values + at, mask=part < num_parts, other=float("-inf"))
        whose = tl.load(outputs + at, mask=part < num_parts, other=2147483647)
        top = tl.max(mine, axis=0)
        lowest = tl.min(tl.where(mine == top, whose, 2147483647), axis=0)
        output = tl.where(top > value, lowest, output)
        value = tl.maximum(value, top)
    tl.store(best + token, tl.where(output == 2147483647, 0, output).to(tl.int64))
    tl.store(best_value + token, value)
