"""The dense layer on CUDA: one chain of sums per output, in tiles of any shape, and what may end it."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu.checks import absent, check, is_described
from hemiola.plugins.gpu.dense import activate, best_of, chain, halves, place_of, row_of
from hemiola.plugins.gpu.device import gpu_of
from hemiola.plugins.gpu.dtypes import DTYPES, FLOATS
from hemiola.plugins.gpu.tiles import FALLBACK, Tile, tile_of

ACTIVATIONS = ("none", "relu2", "swiglu")


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
) -> torch.Tensor:  # [T, O]
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    return fused(x, weight, bias)


def fused(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]; with swiglu all gates, then all values
    bias: torch.Tensor | None = None,  # [O]
    residual: torch.Tensor | None = None,  # [T, O], or [T, O / 2] with swiglu
    activation: str = "none",
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, O], or [T, O / 2]
    """residual + activation(x @ weight.T + bias), in fp32 until the end."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    _check(x, weight)
    num_tokens, num_outputs = x.shape[0], weight.shape[0]
    if activation == "swiglu" and num_outputs % 2:
        raise ValueError(f"linear: {num_outputs} outputs are no pairs of gate and value")
    width = num_outputs // 2 if activation == "swiglu" else num_outputs
    if bias is not None and absent(bias):
        bias = None
    if bias is not None:
        check("linear", "bias", bias, (num_outputs,), FLOATS, x.device)
    if residual is not None:
        check("linear", "residual", residual, (num_tokens, width), FLOATS, x.device)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        described = [x, weight, y] if residual is None else [x, weight, y, residual]
        tile = tile or _tile_of(described, num_tokens, num_outputs, activation)
        _launch(x, weight, bias, residual, y, None, activation, tile)
    return y


def linear_argmax(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    tile: Tile | None = None,
) -> torch.Tensor:  # [T] int32
    """argmax of linear(x, weight), in x's dtype, ties to the lowest output; the outputs are never stored."""
    _check(x, weight)
    num_tokens, num_outputs = x.shape[0], weight.shape[0]
    tile = tile or _tile_of([x, weight], num_tokens, num_outputs, "argmax")
    num_parts = triton.cdiv(num_outputs, tile.outputs)
    values = torch.empty(num_parts, num_tokens, dtype=torch.float32, device=x.device)
    outputs = torch.empty(num_parts, num_tokens, dtype=torch.int32, device=x.device)
    best = torch.empty(num_tokens, dtype=torch.int32, device=x.device)
    if num_tokens:
        _launch(x, weight, None, None, values, outputs, "argmax", tile)
        _best_part[(num_tokens,)](values, outputs, best, num_tokens, num_parts, BLOCK=1024, num_warps=4)
    return best


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check("linear", "x", x, (None, None), FLOATS, x.device)
    check("linear", "weight", weight, (None, x.shape[1]), (x.dtype,), x.device)
    if not weight.numel():
        raise ValueError(f"linear: weight has the shape {list(weight.shape)}")


def _tile_of(described: list[torch.Tensor], num_tokens: int, num_outputs: int, activation: str) -> Tile:
    tile = tile_of(num_tokens, num_outputs, gpu_of(described[0].device), activation == "swiglu")
    if described[0].dtype is torch.float32:
        return FALLBACK
    return tile if not tile.is_persistent or all(map(is_described, described)) else FALLBACK


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    best: torch.Tensor | None,  # with argmax: the outputs whose values y holds
    activation: str,
    tile: Tile,
) -> None:
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    sizes = (num_tokens, num_outputs, num_inputs)
    how = {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "INNER": tile.inner,
           "WEIGHT_FIRST": tile.weight_first, "ACTIVATION": activation, "BIASED": bias is not None,
           "ADDS": residual is not None, "DTYPE": DTYPES[x.dtype], "num_warps": tile.warps,
           "num_stages": tile.stages - (residual is not None and tile.parts() > 1),
           "enable_fp_fusion": False}  # fmt: skip
    token_tiles, output_tiles = triton.cdiv(num_tokens, tile.tokens), triton.cdiv(num_outputs, tile.outputs)
    bias, best = y if bias is None else bias, y if best is None else best
    if tile.is_persistent:
        box = [tile.tokens, tile.outputs // tile.parts() // (2 if activation == "swiglu" else 1)]
        _persistent[(min(gpu_of(x.device).multiprocessors, token_tiles * output_tiles),)](
            TensorDescriptor.from_tensor(x, [tile.tokens, tile.inner]), _rows(weight, tile, activation), bias,
            y if residual is None else TensorDescriptor.from_tensor(residual, box), best,
            y if activation == "argmax" else TensorDescriptor.from_tensor(y, box), *sizes,
            GROUP=tile.group, PARTS=tile.parts(), **how,
        )  # fmt: skip
    else:
        lens = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(0))
        _tiles[token_tiles, output_tiles](
            x, weight, bias, y if residual is None else residual, best, y, *sizes, *lens,
            WHOLE=num_inputs % tile.inner == 0, **how,
        )  # fmt: skip


def _rows(weight: torch.Tensor, tile: Tile, activation: str) -> TensorDescriptor:
    """Blocks of the weight's rows; with swiglu half a block of gates and the values that belong to them."""
    if activation != "swiglu":
        return TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inner])
    return TensorDescriptor.from_tensor(weight.unflatten(0, (2, -1)), [2, tile.outputs // 2, tile.inner])


@triton.jit(do_not_specialize=["num_tokens"])
def _tiles(x, weight, bias, residual, best, y, num_tokens, num_outputs, num_inputs, x_len, weight_len,
           residual_len, y_len, WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
           OUTPUTS: tl.constexpr, INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
           BIASED: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    # Grid: token tiles x output tiles, neighbours in the same weights.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: the weights once per token tile, x once per output tile (from L2), y once.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    row = row_of(first_output, num_outputs, OUTPUTS, ACTIVATION).to(tl.int64)
    x_lines = x + token * x_len
    weight_lines = weight + row * weight_len
    total = chain(x_lines, token < num_tokens, weight_lines, num_inputs, WHOLE, WEIGHT_FIRST, TOKENS, OUTPUTS,
                  INNER)  # fmt: skip
    if ACTIVATION == "argmax":
        _store_best(total, y, best, token, first_output, num_tokens, num_outputs, DTYPE, OUTPUTS)
    else:
        total = _end(total, bias, row, ACTIVATION, BIASED)
        halved: tl.constexpr = OUTPUTS // total.shape[1]
        column = first_output // halved + tl.arange(0, OUTPUTS // halved)
        inside = (token < num_tokens)[:, None] & (column < num_outputs // halved)[None, :]
        if ADDS:
            line = residual + token[:, None] * residual_len + column[None, :]
            total += tl.load(line, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + token[:, None] * y_len + column[None, :], total.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _persistent(x, weight, bias, residual, best, y, num_tokens, num_outputs, num_inputs, GROUP: tl.constexpr,
                PARTS: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
                INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
                BIASED: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, weight, residual and y are descriptors.
    # Tile: [TOKENS, OUTPUTS], the whole inner dimension.
    # Traffic: x once per output tile and weights once per token tile, mostly from L2; y once.
    num_output_tiles, num_token_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_tokens, TOKENS)
    num_tiles = num_output_tiles * num_token_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, first_output = token_tile * TOKENS, output_tile * OUTPUTS
        if WEIGHT_FIRST:
            total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        else:
            total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, num_inputs, INNER):
            a = x.load([first_token, start])
            b = _load_rows(weight, first_output, start, OUTPUTS, INNER, ACTIVATION)
            total = tl.dot(b, a.T, total) if WEIGHT_FIRST else tl.dot(a, b.T, total)
        if WEIGHT_FIRST:
            total = total.T
        if ACTIVATION == "argmax":
            token = first_token.to(tl.int64) + tl.arange(0, TOKENS)
            _store_best(total, y, best, token, first_output, num_tokens, num_outputs, DTYPE, OUTPUTS)
        else:
            _store_parts(total, bias, residual, y, first_token, first_output, num_outputs, PARTS, DTYPE,
                         OUTPUTS, ACTIVATION, BIASED, ADDS)  # fmt: skip


@triton.jit
def _load_rows(weight, first_output, start, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
               ACTIVATION: tl.constexpr):  # fmt: skip
    """[OUTPUTS, INNER] of the weight; see row_of."""
    if ACTIVATION == "swiglu":
        return tl.reshape(weight.load([0, first_output // 2, start]), (OUTPUTS, INNER))
    else:
        return weight.load([first_output, start])


@triton.jit
def _end(total, bias, row, ACTIVATION: tl.constexpr, BIASED: tl.constexpr):
    """A tile after bias and activation."""
    if BIASED:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    return activate(total, ACTIVATION)


@triton.jit
def _store_parts(total, bias, residual, y, first_token, first_output, num_outputs, PARTS: tl.constexpr,
                 DTYPE: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
                 ADDS: tl.constexpr):  # fmt: skip
    """Ends a tile and stores it through y's descriptor, in one or two parts."""
    total = _end(total, bias, row_of(first_output, num_outputs, OUTPUTS, ACTIVATION), ACTIVATION, BIASED)
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
def _best_part(values, outputs, best, num_tokens, num_parts, BLOCK: tl.constexpr):
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
    tl.store(best + token, tl.where(output == 2147483647, 0, output))
