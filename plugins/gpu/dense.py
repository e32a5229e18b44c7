"""What dense layers and experts share on CUDA: a tile's chain of sums, and how it ends.

One output is one chain over the inner dimension, sixteen products at a time and in order, whatever tile it is
computed in: `mma.sync` and `wgmma` add alike. So a tile's shape is free, and a row's bits never depend on it.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import relu2, silu


@triton.jit
def chain(x_lines, live, weight_lines, num_inputs, WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
          TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """The sums of the tile whose lines start at these pointers, [TOKENS, OUTPUTS] fp32; zeros where not live.

    WEIGHT_FIRST puts outputs where the tensor core wants 64 rows, so that few tokens fill its instruction.
    WHOLE: num_inputs is a multiple of INNER.
    """
    inner = tl.arange(0, INNER)
    x_at, weight_at = x_lines[:, None] + inner[None, :], weight_lines[None, :] + inner[:, None]
    if WEIGHT_FIRST:
        total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    else:
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, INNER):
        if WHOLE:
            a = tl.load(x_at, mask=live[:, None], other=0.0)
            b = tl.load(weight_at)
        else:
            inside = start + inner < num_inputs
            a = tl.load(x_at, mask=live[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=inside[:, None], other=0.0)
        if WEIGHT_FIRST:
            total = tl.dot(b.T, a.T, total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
        x_at += INNER
        weight_at += INNER
    return tl.trans(total) if WEIGHT_FIRST else total


@triton.jit
def halves(total):
    """The left and the right half of a tile's outputs."""
    return tl.split(tl.permute(tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def row_of(first_output, num_outputs, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The weight's row of every output of a tile; swiglu's tiles are gates, then the values they open."""
    lane = tl.arange(0, OUTPUTS)
    if ACTIVATION == "swiglu":
        half: tl.constexpr = OUTPUTS // 2
        pair = tl.minimum(first_output // 2 + lane % half, num_outputs // 2 - 1)
        return pair + lane // half * (num_outputs // 2)
    else:
        return tl.minimum(first_output + lane, num_outputs - 1)


@triton.jit
def activate(total, ACTIVATION: tl.constexpr):
    """[TOKENS, OUTPUTS] -> the same, or with swiglu half as many outputs."""
    if ACTIVATION == "relu2":
        return relu2(total)
    elif ACTIVATION == "swiglu":
        gate, value = halves(total)
        return silu(gate) * value
    else:
        return total


@triton.jit
def open_eights(total):
    """[TOKENS, OUTPUTS] -> half as many: of sixteen outputs eight are gates, behind them what they open.

    A thread holds columns c and c + 8 of a product, and rows r and r + 8: nothing changes hands.
    """
    eights = tl.reshape(total, (total.shape[0], total.shape[1] // 16, 2, 8))
    gate, value = tl.split(tl.permute(eights, (0, 1, 3, 2)))
    return tl.reshape(silu(gate) * value, (total.shape[0], total.shape[1] // 2))


@triton.jit
def best_of(total, first_output, num_outputs, DTYPE: tl.constexpr):
    """The highest of a tile's outputs per token, as DTYPE rounds them, and the lowest output that has it.

    NaN counts as infinite: neither is a number that a token could be chosen by.
    """
    output = first_output + tl.arange(0, total.shape[1])[None, :]
    value = total.to(DTYPE).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    value = tl.where(output < num_outputs, value, float("-inf"))
    best = tl.max(value, axis=1)
    first = tl.min(tl.where((value == best[:, None]) & (output < num_outputs), output, 2147483647), axis=1)
    return best, first


@triton.jit
def place_of(tile, num_output_tiles, num_token_tiles, GROUP: tl.constexpr):
    """(output tile, token tile) of a tile: GROUP token tiles walk along the outputs together."""
    width = GROUP * num_output_tiles
    first = tile // width * GROUP
    size = tl.minimum(num_token_tiles - first, GROUP)
    return tile % width // size, first + tile % width % size
