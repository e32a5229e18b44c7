"""The dense layer, compiled: every output is one chain of fused multiply-adds in the order of the inputs.

Weights lie in strips of STRIP outputs, and stay bfloat16 if they came so: few tokens run at the speed of
memory. Tokens are taken in blocks, inputs in stretches of DEPTH; y holds the sums from stretch to stretch.
"""

import torch

from hemiola.plugins.cpu.code import Code, Operand, code_of, lines, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import LANES, add, get, get_long, load, put, store
from hemiola.plugins.cpu.sizes import Number, ceil_div, least, most
from hemiola.plugins.cpu.tiles import (
    ABREAST,
    DEPTH,
    FEW,
    HEIGHT,
    PAUSE,
    STRIP,
    VECTORS,
    tile_of_floats,
    tile_of_halves,
    widen,
)

BLOCK = 288  # most rows of an item: a strip's weights are read once for all of them
UNIT = ABREAST[0]  # strips that stay in one item
ITEMS = 4  # for each thread, or the last one to end keeps the others waiting
SCRATCH = 4 * (BLOCK * DEPTH + DEPTH * STRIP + BLOCK * STRIP)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [..., O, F] as [..., ceil(O / STRIP), F, STRIP]; what is not bfloat16 becomes fp32."""
    *outer, num_outputs, num_inputs = weight.shape
    halves = weight.dtype is torch.bfloat16
    wide = torch.nn.functional.pad(weight if halves else weight.float(), (0, 0, 0, -num_outputs % STRIP))
    strips = wide.view(*outer, -1, STRIP, num_inputs).mT
    if halves:  # outputs j and 16 + j side by side: they are widened without a shuffle
        strips = strips.unflatten(-1, (2, LANES)).mT.flatten(-2)
    return strips.contiguous()


def linear(
    x: Operand,  # [T, F]
    packed: Operand,  # pack(weight [O, F])
    bias: Operand,  # [O], or zero-length: none
    num_outputs: int,  # O
    residual: Operand = None,  # [T, O] that is added, rounded by itself
) -> Operand:  # [T, O]
    """See reference.py."""
    num_tokens, num_inputs = x.shape
    num_strips, depth, _ = packed.shape
    if depth != num_inputs or num_strips != -(-num_outputs // STRIP):
        raise ValueError(
            f"linear: {tuple(packed.shape)} is not packed from {num_outputs} outputs of {num_inputs} inputs"
        )
    code, x, num_blocks = code_of(x), lines(x), ceil_div(num_tokens, BLOCK)
    y, num_groups = code.empty(num_tokens, num_outputs), split(code, num_strips, num_blocks)
    code.call(
        multiply, num_blocks * num_groups, work(numel(packed), packed.itemsize, num_tokens),
        num_blocks, 0, num_tokens, num_groups, x, x.stride(0), 0,
        packed, packed.dtype is torch.bfloat16, num_inputs, num_outputs,
        bias if bias.shape[0] else 0, 0 if residual is None else residual,
        0 if residual is None else residual.stride(0), y, scratch=SCRATCH,
    )  # fmt: skip
    return y


def split(code: Code, num_strips: int, num_blocks: Number) -> Number:
    """Into how few groups the strips go to keep all threads at work: each copies a block's rows again."""
    return least(ceil_div(num_strips, UNIT), ceil_div(code.threads * ITEMS, most(num_blocks, 1)))


def work(size: int, itemsize: int, num_rows: Number) -> Number | float:
    """Nanoseconds of reading so many weights and multiplying them by so many rows, roughly."""
    return num_rows * (0.01 * size) + 0.05 * itemsize * size


@Kernel
def multiply(
    item,
    scratch,  # SCRATCH bytes
    num_blocks,
    blocks,  # [num_blocks, 3] int64: expert, first row, rows; or 0: all rows in blocks of one size
    num_rows,
    num_groups,
    x,
    x_len,  # from row to row
    rows,  # [R] int64: the row of x for each row of y; or 0: the same one
    packed,  # [E, strips, F, STRIP]
    halves,  # whether it is bfloat16
    num_inputs,
    num_outputs,
    bias,  # or 0
    residual,  # [R, O], or 0
    residual_len,  # from row to row
    y,  # [R, O]
):
    """An item is a block of rows and a group of strips; those of a group follow each other."""
    group, block = item // num_blocks, item % num_blocks
    expert, (first, last) = 0, _share(num_rows, num_blocks, block)
    if blocks != 0:
        expert, first = get_long(blocks, 3 * block), get_long(blocks, 3 * block + 1)
        last = first + get_long(blocks, 3 * block + 2)
    if first == last:
        return
    num_strips = (num_outputs + STRIP - 1) // STRIP
    begin, end = _share((num_strips + UNIT - 1) // UNIT, num_groups, group)
    size = num_inputs * STRIP * (2 if halves else 4)
    matrix = packed + expert * num_strips * size
    panel, out = scratch, y + 4 * first * num_outputs
    for at in range(0, num_inputs, DEPTH):
        count = min(DEPTH, num_inputs - at)
        for n in range(first, last):
            row = n if rows == 0 else get_long(rows, n)
            move(x, row * x_len + at, panel, (n - first) * DEPTH, count)
        _stretch(
            scratch, last - first, matrix, halves, num_inputs, at, count,
            begin * UNIT, min(end * UNIT, num_strips), num_outputs, out
        )  # fmt: skip
    added = residual + 4 * first * residual_len if residual != 0 else 0
    _finish(
        scratch, last - first, begin * UNIT, min(end * UNIT, num_strips), num_outputs, bias, added,
        residual_len, out
    )  # fmt: skip


@helper
def _share(size, parts, part):
    """Where a part of 0 .. size begins and ends."""
    return size * part // parts, size * (part + 1) // parts


@helper
def _stretch(scratch, num_rows, matrix, halves, num_inputs, at, count, begin, end, num_outputs, y):
    """Inputs at .. at + count of the rows in scratch times strips begin .. end, added to y.

    The sums of a last strip that goes beyond the outputs lie in scratch.
    """
    room = scratch + 4 * BLOCK * DEPTH
    beyond = room + 4 * DEPTH * STRIP
    full = min(end, num_outputs // STRIP)
    strip_len, size = num_inputs * STRIP, 2 if halves else 4
    most = ABREAST[num_rows - 1] if num_rows <= len(ABREAST) else 1
    strip = begin
    while strip < end:
        abreast = most if strip + most <= full else 1
        weight = matrix + size * (strip * strip_len + at * STRIP)
        if strip + abreast < end:
            soon = weight + size * abreast * strip_len
        else:
            soon = matrix + size * (begin * strip_len + (at + DEPTH) * STRIP)
        out, out_len = y + 4 * strip * STRIP, num_outputs
        if strip >= full:
            out, out_len = beyond, STRIP
        _tiles(scratch, num_rows, weight, halves, strip_len, abreast, count, room, out, out_len, at, soon)
        strip += abreast


@helper
def _tiles(panel, num_rows, weight, halves, strip_len, abreast, count, room, y, y_len, going_on, soon):
    """All rows of a block times one strip, or few rows times strips side by side."""
    step = 2 * STRIP if halves else 4 * STRIP
    if halves and num_rows <= FEW:
        tile_of_halves(
            num_rows, 2 * abreast, panel, weight, strip_len, count, y, y_len, going_on,
            soon, step, 1, y + 4 * STRIP
        )  # fmt: skip
        return
    if halves:
        for i in range(0, count * STRIP, STRIP):
            widen(weight, i, room)
        weight = room
    vectors = VECTORS if num_rows > len(ABREAST) else 2 * abreast
    num_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    num_parts = 1  # of the next strip, which so many tiles bring
    while 2 * num_parts <= min(num_tiles, PAUSE):
        num_parts *= 2
    step, pause = step // num_parts, num_parts
    for v in range(0, 2 * abreast, vectors):
        for n in range(num_tiles):
            first, last = _share(num_rows, num_tiles, n)
            out, out_soon = y + 4 * (first * y_len + LANES * v), y + 4 * (last * y_len + LANES * v)
            if last == num_rows:
                out_soon = y + 4 * LANES * (v + vectors)
            tile_of_floats(
                last - first, vectors, panel + 4 * first * DEPTH, weight + 4 * LANES * v, strip_len, count,
                out, y_len, going_on, soon, step, pause, out_soon
            )  # fmt: skip
            soon += count * step
            if v == 0 and n + 1 == num_parts:  # once is enough
                soon, step, pause = weight, 0, DEPTH


@helper
def _finish(scratch, num_rows, begin, end, num_outputs, bias, residual, residual_len, y):
    """Fetch the last outputs from scratch; add the bias, then the residual."""
    beyond = scratch + 4 * (BLOCK * DEPTH + DEPTH * STRIP)
    full = min(end, num_outputs // STRIP)
    for row in range(num_rows):
        line = y + 4 * row * num_outputs
        if bias != 0:
            for i in range(begin * STRIP, full * STRIP, LANES):
                store(line, i, add(load(line, i), load(bias, i)))
        if residual != 0:
            for i in range(begin * STRIP, full * STRIP, LANES):
                store(line, i, add(load(line, i), load(residual, row * residual_len + i)))
        if full < end:
            for i in range(num_outputs - full * STRIP):
                value, at = get(beyond, row * STRIP + i), full * STRIP + i
                if bias != 0:
                    value = value + get(bias, at)
                put(line, at, value + get(residual, row * residual_len + at) if residual != 0 else value)
