"""The dense layer, compiled: every output is one chain of fused multiply-adds in the order of the inputs.

Weights lie in strips of STRIP outputs, and stay bfloat16 or quantised if they came so: few tokens run at the
speed of memory. Tokens are taken in blocks, inputs in stretches of DEPTH; y holds the sums from stretch to
stretch.
"""

from typing import NamedTuple

import torch

from hemiola.plugins.cpu.code import Code, Operand, code_of, lines
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import LANES, add, get, get_long, load, put, store
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
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.linear.codes import (
    HALVES,
    KINDS,
    narrow_tile,
    pack_group,
    packed_span,
    places,
    strip_bytes,
    widen_codes,
)
from hemiola.plugins.sizes import Number, ceil_div, least, most

BLOCK = 288  # most rows of an item: a strip's weights are read once for all of them
UNIT = ABREAST[0]  # strips that stay in one item
ITEMS = 4  # for each thread, or the last one to end keeps the others waiting
SCRATCH = 4 * (BLOCK * DEPTH + DEPTH * STRIP + BLOCK * STRIP)


def pack(weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """A weight [..., O, F] as [..., ceil(O / STRIP), F, STRIP]; what is not bfloat16 becomes fp32.
    Quantised: see codes.py."""
    if isinstance(weight, WeightGroup):
        return pack_group(weight)
    *outer, num_outputs, num_inputs = weight.shape
    halves = weight.dtype is torch.bfloat16
    wide = torch.nn.functional.pad(weight if halves else weight.float(), (0, 0, 0, -num_outputs % STRIP))
    strips = wide.view(*outer, -1, STRIP, num_inputs).mT
    if halves:  # outputs j and 16 + j side by side: they are widened without a shuffle
        strips = strips.unflatten(-1, (2, LANES)).mT.flatten(-2)
    return strips.contiguous()


class Packed(NamedTuple):
    """A packed weight, but for its address."""

    kind: int  # of codes.py
    span: int  # inputs that share a scale
    has_zeros: bool
    strip_bytes: int

    @staticmethod
    def of(packed: Operand, layout: Layout | None, num_outputs: int, num_inputs: int) -> "Packed":
        """Raises ValueError where this is not packed from a weight [.., num_outputs, num_inputs]."""
        num_strips = -(-num_outputs // STRIP)
        if layout is None:
            expected, kind = (num_strips, num_inputs, STRIP), int(packed.dtype is torch.bfloat16)
            found = Packed(kind, DEPTH, False, num_inputs * STRIP * packed.itemsize)
        else:
            expected = (num_strips, strip_bytes(layout, num_inputs))
            found = Packed(KINDS[layout.kind], packed_span(layout), "zeros" in layout.others, expected[1])
        if tuple(packed.shape[-len(expected) :]) != expected:
            raise ValueError(
                f"linear: {tuple(packed.shape)} is not packed from {num_outputs} outputs of"
                f" {num_inputs} inputs"
            )
        return found

    @property
    def kernel(self) -> tuple[Kernel, tuple[int, ...]]:
        """What multiplies by it, and what that must know."""
        return (multiply_codes, tuple(self)) if self.kind > HALVES else (multiply, (self.kind,))


def linear(
    x: Operand,  # [T, F]
    packed: Operand,  # pack(weight [O, F])
    bias: Operand,  # [O], or zero-length: none
    num_outputs: int,  # O
    residual: Operand = None,  # [T, O] that is added, rounded by itself
    weight_layout: Layout | None = None,  # of a quantised weight
) -> Operand:  # [T, O]
    """See reference.py."""
    num_tokens, num_inputs = x.shape
    form, num_strips = Packed.of(packed, weight_layout, num_outputs, num_inputs), packed.shape[0]
    code, x, num_blocks = code_of(x), lines(x), ceil_div(num_tokens, BLOCK)
    y, num_groups = code.empty(num_tokens, num_outputs), split(code, num_strips, num_blocks)
    residual = None if residual is None else lines(residual)
    added = (0, 0) if residual is None else (residual, residual.stride(0))
    kernel, details = form.kernel
    code.call(
        kernel, num_blocks * num_groups, work(num_strips, num_inputs, form, num_tokens),
        num_blocks, 0, num_tokens, num_groups, x, x.stride(0), 0,
        packed, *details, num_inputs, num_outputs,
        bias if bias.shape[0] else 0, *added, y, scratch=SCRATCH,
    )  # fmt: skip
    return y


def split(code: Code, num_strips: int, num_blocks: Number) -> Number:
    """Into how few groups the strips go to keep all threads at work: each copies a block's rows again."""
    return least(ceil_div(num_strips, UNIT), ceil_div(code.threads * ITEMS, most(num_blocks, 1)))


def work(
    num_strips: int, num_inputs: int, form: Packed, num_rows: Number, reads: Number = 1
) -> Number | float:
    """Nanoseconds of reading a weight `reads` times and multiplying it by so many rows, roughly."""
    per_row = 0.01 * num_strips * num_inputs * STRIP
    return num_rows * per_row + reads * (0.05 * num_strips * form.strip_bytes)


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
    """An item is a block of rows and a group of strips."""
    expert, first, last, begin, end = part_of(item, num_blocks, blocks, num_rows, num_groups, num_outputs)
    if first == last:
        return
    size = num_inputs * STRIP * (2 if halves else 4)
    matrix, out = packed + expert * _num_strips(num_outputs) * size, y + 4 * first * num_outputs
    for at in range(0, num_inputs, DEPTH):
        count = min(DEPTH, num_inputs - at)
        _bring(x, x_len, rows, first, last, at, count, scratch)
        _stretch(
            scratch, last - first, matrix, halves, num_inputs, at, count, begin, end, num_outputs, out
        )  # fmt: skip
    added = residual + 4 * first * residual_len if residual != 0 else 0
    finish(scratch, last - first, begin, end, num_outputs, bias, added, residual_len, out)


@Kernel
def multiply_codes(
    item, scratch, num_blocks, blocks, num_rows, num_groups, x, x_len, rows,
    packed,  # [E, strips, bytes]
    kind,  # of codes.py
    span,
    has_zeros,
    strip_bytes,
    num_inputs, num_outputs, bias, residual, residual_len, y,
):  # fmt: skip
    """As multiply, of a quantised weight. They are two kernels because one that knows all kinds takes longer
    for each."""
    expert, first, last, begin, end = part_of(item, num_blocks, blocks, num_rows, num_groups, num_outputs)
    if first == last:
        return
    matrix, out = packed + expert * _num_strips(num_outputs) * strip_bytes, y + 4 * first * num_outputs
    for at in range(0, num_inputs, DEPTH):
        count = min(DEPTH, num_inputs - at)
        _bring(x, x_len, rows, first, last, at, count, scratch)
        _coded_stretch(
            scratch, last - first, matrix, kind, span, has_zeros, strip_bytes, num_inputs, at, count,
            begin, end, num_outputs, out
        )  # fmt: skip
    added = residual + 4 * first * residual_len if residual != 0 else 0
    finish(scratch, last - first, begin, end, num_outputs, bias, added, residual_len, out)


@helper
def part_of(item, num_blocks, blocks, num_rows, num_groups, num_outputs):
    """Of an item: its expert, where its rows begin and end, and its strips, which follow each other."""
    group, block = item // num_blocks, item % num_blocks
    expert, (first, last) = 0, share(num_rows, num_blocks, block)
    if blocks != 0:
        expert, first = get_long(blocks, 3 * block), get_long(blocks, 3 * block + 1)
        last = first + get_long(blocks, 3 * block + 2)
    num_strips = _num_strips(num_outputs)
    begin, end = share((num_strips + UNIT - 1) // UNIT, num_groups, group)
    return expert, first, last, begin * UNIT, min(end * UNIT, num_strips)


@helper
def share(size, parts, part):
    """Where a part of 0 .. size begins and ends."""
    return size * part // parts, size * (part + 1) // parts


@helper
def _num_strips(num_outputs):
    return (num_outputs + STRIP - 1) // STRIP


@helper
def _bring(x, x_len, rows, first, last, at, count, panel):
    """Inputs at .. at + count of a block's rows."""
    for n in range(first, last):
        row = n if rows == 0 else get_long(rows, n)
        move(x, row * x_len + at, panel, (n - first) * DEPTH, count)


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
def _coded_stretch(
    scratch, num_rows, matrix, kind, span, has_zeros, strip_bytes, num_inputs, at, count, begin, end,
    num_outputs, y
):  # fmt: skip
    """As _stretch, of quantised strips."""
    room = scratch + 4 * BLOCK * DEPTH
    beyond = room + 4 * DEPTH * STRIP
    full = min(end, num_outputs // STRIP)
    most = ABREAST[num_rows - 1] if num_rows <= len(ABREAST) else 1
    strip = begin
    while strip < end:
        abreast = most if strip + most <= full else 1
        codes, scales, zeros = places(kind, matrix + strip * strip_bytes, num_inputs, span, has_zeros, at)
        ahead, behind = abreast, 0  # the next strips, or the first ones' next stretch
        if strip + abreast >= end:
            ahead, behind = begin - strip, DEPTH
        next_ = matrix + (strip + ahead) * strip_bytes
        codes_soon, scales_soon, _ = places(kind, next_, num_inputs, span, has_zeros, at + behind)
        out, out_len = y + 4 * strip * STRIP, num_outputs
        if strip >= full:
            out, out_len = beyond, STRIP
        coded_tiles(
            scratch, num_rows, kind, codes, scales, zeros, strip_bytes, span, abreast, count, at, room,
            out, out_len, codes_soon, scales_soon
        )  # fmt: skip
        strip += abreast


@helper
def coded_tiles(
    panel, num_rows, kind, codes, scales, zeros, strip_bytes, span, abreast, count, going_on, room, y, y_len,
    codes_soon, scales_soon
):  # fmt: skip
    """As _tiles, of quantised strips: few rows widen them on their way, others in `room`."""
    if num_rows <= FEW:
        narrow_tile(
            kind, num_rows, abreast, panel, codes, scales, zeros, strip_bytes, span, count, y, y_len,
            going_on, codes_soon, scales_soon
        )  # fmt: skip
        return
    widen_codes(kind, codes, scales, zeros, span, count, room, codes_soon, scales_soon)
    _wide_tiles(panel, num_rows, room, DEPTH * STRIP, 1, count, y, y_len, going_on, room, 4 * STRIP)


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
    _wide_tiles(panel, num_rows, weight, strip_len, abreast, count, y, y_len, going_on, soon, step)


@helper
def _wide_tiles(panel, num_rows, weight, strip_len, abreast, count, y, y_len, going_on, soon, step):
    """As _tiles, of fp32 weights; `step` bytes for each input are fetched from `soon` on."""
    vectors = VECTORS if num_rows > len(ABREAST) else 2 * abreast
    num_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    num_parts = 1  # of the next strip, which so many tiles bring
    while 2 * num_parts <= min(num_tiles, PAUSE):
        num_parts *= 2
    step, pause = step // num_parts, num_parts
    for v in range(0, 2 * abreast, vectors):
        for n in range(num_tiles):
            first, last = share(num_rows, num_tiles, n)
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
def finish(scratch, num_rows, begin, end, num_outputs, bias, residual, residual_len, y):
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
