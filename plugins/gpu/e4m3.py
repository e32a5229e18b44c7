"""Inputs and weights in e4m3 in Triton: how inputs are rounded, and the chain of their sums.

The order is that of plugins/inputs.py: products of STEP inputs are summed from zero by the tensor cores,
which keep some 14 bits, and each sum is scaled and promoted to fp32. Outputs lie on the rows of the tensor
cores' instruction, 64 at least, whatever the tile: fewer rows would be emulated by products of fp16.
"""

import triton
import triton.language as tl

from hemiola.plugins import inputs

STEP = tl.constexpr(inputs.SPAN)
LEAST, INVERSE = tl.constexpr(inputs.LEAST), tl.constexpr(inputs.INVERSE)


@triton.jit
def codes_of(value, scale):
    """The nearest numbers of e4m3, the largest for what is beyond it; NaN stays NaN. plugins/cpu/e4m3.py has
    the same operations, which the interpreter computes, too; it rounds to e4m3 otherwise than a GPU."""
    bits = tl.div_rn(value, scale).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    near = tl.minimum(size, 0x43E00000)  # 448
    # next to 2^14 fp32 numbers lie as far apart as e4m3's below 2^-6
    multiple = (near.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    upper = (near - 0x3BF80001 + ((near >> 20) & 1)) >> 20
    code = tl.where(near < 0x3C800000, multiple, upper)
    code = tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def scale_of(size):
    """Of the largest size of a scale's inputs, NaN among them."""
    return tl.where(size < LEAST, LEAST, size) * INVERSE


@triton.jit
def largest(value, axis: tl.constexpr):
    """The largest size, or NaN where one is no finite number."""
    size = tl.abs(value)
    return tl.max(size, axis=axis) + tl.sum(size - size, axis=axis)


@triton.jit
def e4m3_chain(x_lines, by_lines, apart, live, weight, scales, row, num_outputs, width, span,
               BY_GROUP: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """The sums of the rows `row` of a weight [O, width] and lines of codes, [OUTPUTS, TOKENS] fp32.

    span: inputs that share a scale of the weight, scales are [width / span, O]; by_lines: scales of inputs,
    of the next group `apart` from them.
    """
    inner = tl.arange(0, STEP)
    x_at = x_lines[None, :] + inner[:, None]
    weight_at = weight + row.to(tl.int64)[:, None] * width + inner[None, :]
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for begin in range(0, width, STEP):
        codes = tl.load(x_at + begin, mask=live[None, :], other=0.0)
        sums = tl.dot(tl.load(weight_at + begin), codes)
        by = tl.load(by_lines, mask=live, other=0.0)
        scale = tl.load(scales + (begin // span).to(tl.int64) * num_outputs + row)
        total = tl.fma(sums * by[None, :], tl.broadcast_to(scale[:, None], (OUTPUTS, TOKENS)), total)
        if BY_GROUP:
            by_lines += apart
    return total


@triton.jit
def apart(num_lines):
    """From a group's scales to the next one's: descriptors (TMA) begin at 16 bytes."""
    return tl.cdiv(num_lines, 4) * 4


@triton.jit
def round_line(line, num_inputs, static, codes, scales, apart, width, BY: tl.constexpr, BLOCK: tl.constexpr):
    """One row's codes, up to `width` zeros, and its scales, `apart` from each other; `static`: the scale
    where it is the weight's."""
    lane = tl.arange(0, BLOCK)
    if BY == "token":
        size = tl.zeros((), tl.float32)
        for start in range(0, num_inputs, BLOCK):
            value = tl.load(line + start + lane, mask=start + lane < num_inputs, other=0.0).to(tl.float32)
            part = largest(value, 0)
            size = tl.where((part > size) | (part != part), part, size)
        scale = scale_of(size)
        tl.store(scales, scale)
    if BY == "static":
        scale = tl.load(static)
        tl.store(scales, scale)
    for start in range(0, width, BLOCK):
        at = start + lane
        value = tl.load(line + at, mask=at < num_inputs, other=0.0).to(tl.float32)
        if BY == "group":
            groups = tl.reshape(value, (BLOCK // STEP, STEP))
            by = scale_of(largest(groups, 1))
            group = start // STEP + tl.arange(0, BLOCK // STEP)
            tl.store(scales + group.to(tl.int64) * apart, by, mask=group * STEP < width)
            found = tl.reshape(codes_of(groups, by[:, None]), (BLOCK,))
        else:
            found = codes_of(value, scale)
        tl.store(codes + at, found, mask=at < width)
