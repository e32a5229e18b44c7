"""The dense layer of inputs and weights in e4m3, compiled: bit for bit what plugins/inputs.py says.

Inputs are rounded once, for all outputs. Codes of weights are widened and multiplied by the tiles of
compiled.py, SPAN inputs at a time from zero, and each such sum is scaled and added to y.
"""

from hemiola.plugins.cpu.code import Operand, code_of, lines
from hemiola.plugins.cpu.e4m3 import larger_size, nearest_e4m3
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    div,
    f32,
    get,
    get_long,
    load,
    load_some,
    mul,
    peak,
    put,
    splat,
    store,
    store_some,
)
from hemiola.plugins.cpu.tiles import ABREAST, DEPTH, STRIP
from hemiola.plugins.groups import Layout
from hemiola.plugins.inputs import INVERSE, LEAST, SPAN
from hemiola.plugins.linear.codes import IN_E4M3
from hemiola.plugins.linear.compiled import (
    BLOCK,
    SCRATCH,
    Packed,
    coded_tiles,
    finish,
    part_of,
    share,
    split,
    work,
)
from hemiola.plugins.sizes import Number, ceil_div

LINES = 16  # rows of an item that are rounded
Added = tuple[Operand, Operand, Operand]  # compiled.multiply's bias, residual and residual_len
SCRATCH_E4M3 = SCRATCH + 4 * BLOCK * STRIP


def linear(
    x: Operand,  # [T, F]
    packed: Operand,  # pack(weight [O, F])
    bias: Operand,  # [O], or zero-length: none
    num_outputs: int,  # O
    weight_layout: Layout,
    residual: Operand = None,  # [T, O] that is added, rounded by itself
) -> Operand:  # [T, O]
    """See reference.py."""
    x, num_tokens = lines(x), x.shape[0]
    residual = None if residual is None else lines(residual)
    added: Added = (bias if bias.shape[0] else 0, 0, 0)
    if residual is not None:
        added = (added[0], residual, residual.stride(0))
    sizes = (num_tokens, x.shape[1], num_outputs)
    return product(x, packed, weight_layout, sizes, added)


def product(
    x: Operand,  # lines [T, F]
    packed: Operand,  # pack(weight [.., O, F])
    layout: Layout,
    sizes: tuple[Number, int, int],  # R, F and O
    added: Added = (0, 0, 0),
    experts: tuple[Number, Operand, Operand] | None = None,  # its num_blocks, blocks and rows
) -> Operand:  # [R, O]
    """Rows of x, rounded, times the weight, or that of each block's expert."""
    code, num_strips, (num_rows, num_inputs, num_outputs) = code_of(x), packed.shape[-2], sizes
    form = Packed.of(packed, layout, num_outputs, num_inputs)
    num_items, blocks, rows = experts or (ceil_div(num_rows, LINES), 0, 0)
    num_blocks = num_items if experts else ceil_div(num_rows, BLOCK)
    by_group = layout.inputs == "group"
    span = SPAN if by_group else num_inputs
    num_scales = -(-num_inputs // span)
    codes, scales = code.empty(num_rows, num_inputs), code.empty(num_rows, num_scales)
    static = form.strip_bytes - 4 * STRIP if layout.inputs == "static" else 0
    code.call(
        _round, num_items, num_rows * (0.5 * num_inputs), num_items, blocks, num_rows, rows, x, x.stride(0),
        num_inputs, span, packed, static, num_strips * form.strip_bytes, codes, scales, scratch=4 * LANES,
    )  # fmt: skip
    y, num_groups = code.empty(num_rows, num_outputs), split(code, num_strips, num_blocks)
    cost = work(num_strips, num_inputs, form, num_rows, num_blocks if experts else 1)
    code.call(
        _multiply, num_blocks * num_groups, cost, num_blocks, blocks, num_rows, num_groups, codes, scales,
        num_scales, packed, form.strip_bytes, layout.span, num_inputs, num_outputs, *added, y,
        scratch=SCRATCH_E4M3,
    )  # fmt: skip
    return y


@Kernel
def _round(
    item, scratch, num_blocks, blocks, num_rows, rows, x, x_len, num_inputs, span, packed, static,
    matrix_bytes, codes, scales
):  # fmt: skip
    """An item is a block of rows; `static`: where in a packed matrix its inputs' scale is, or 0."""
    expert, (first, last) = 0, share(num_rows, num_blocks, item)
    if blocks != 0:
        expert, first = get_long(blocks, 3 * item), get_long(blocks, 3 * item + 1)
        last = first + get_long(blocks, 3 * item + 2)
    num_scales = (num_inputs + span - 1) // span
    for n in range(first, last):
        row = n if rows == 0 else get_long(rows, n)
        for at in range(0, num_inputs, span):
            source, count = row * x_len + at, min(span, num_inputs - at)
            if static != 0:
                scale = get(packed + expert * matrix_bytes + static, 0)
            else:
                scale = _scale_of(x, source, count, scratch)
            put(scales, n * num_scales + at // span, scale)
            for i in range(0, count, LANES):
                value = div(load_some(x, source + i, count - i, scratch), splat(scale))
                store_some(codes, n * num_inputs + at + i, count - i, nearest_e4m3(value), scratch)


@helper
def _scale_of(x, at, count, scratch):
    """Where one of them is no finite number, NaN codes say so, whatever this is."""
    sizes = splat(f32(0.0))
    for i in range(0, count, LANES):
        sizes = larger_size(load_some(x, at + i, count - i, scratch), sizes)
    size = peak(sizes)
    if size < f32(LEAST):
        size = f32(LEAST)
    return size * f32(INVERSE)


@Kernel
def _multiply(
    item,
    scratch,  # SCRATCH_E4M3 bytes
    num_blocks,
    blocks,  # as compiled.multiply's
    num_rows,
    num_groups,
    codes,  # [R, F]
    scales,  # [R, G]
    num_scales,  # G: 1, or one for each SPAN
    packed,
    strip_bytes,
    span,  # inputs that share a scale of the weight; 0: all
    num_inputs,
    num_outputs,
    bias,  # or 0
    residual,  # [R, O], or 0
    residual_len,
    y,  # [R, O]
):
    """An item is a block of rows and a group of strips."""
    expert, first, last, begin, end = part_of(item, num_blocks, blocks, num_rows, num_groups, num_outputs)
    if first == last:
        return
    num_strips = (num_outputs + STRIP - 1) // STRIP
    matrix, out = packed + expert * num_strips * strip_bytes, y + 4 * first * num_outputs
    for at in range(0, num_inputs, SPAN):
        count = min(SPAN, num_inputs - at)
        for n in range(first, last):
            move(codes, n * num_inputs + at, scratch, (n - first) * DEPTH, count)
        by = scales + 4 * (first * num_scales + (at // SPAN if num_scales > 1 else 0))
        _stretch(
            scratch, last - first, by, num_scales, matrix, strip_bytes, num_inputs, at, count,
            at // span if span != 0 else 0, begin, end, num_outputs, out
        )  # fmt: skip
    added = residual + 4 * first * residual_len if residual != 0 else 0
    finish(scratch, last - first, begin, end, num_outputs, bias, added, residual_len, out)


@helper
def _stretch(
    scratch, num_rows, scales, num_scales, matrix, strip_bytes, num_inputs, at, count, place, begin, end,
    num_outputs, y
):  # fmt: skip
    """SPAN inputs of the rows in scratch times strips begin .. end, scaled and added to y; as
    compiled._stretch."""
    room = scratch + 4 * BLOCK * DEPTH
    beyond = room + 4 * DEPTH * STRIP
    sums, ones = scratch + SCRATCH, num_inputs * STRIP
    full = min(end, num_outputs // STRIP)
    most = ABREAST[num_rows - 1] if num_rows <= len(ABREAST) else 1
    strip = begin
    while strip < end:
        abreast = most if strip + most <= full else 1
        codes = matrix + strip * strip_bytes
        next_, behind = codes + abreast * strip_bytes, at  # the next strips, or the first ones' next SPAN
        if strip + abreast >= end:
            next_, behind = matrix + begin * strip_bytes, at + SPAN
        coded_tiles(
            scratch, num_rows, IN_E4M3, codes + at * STRIP, codes + ones, 0, strip_bytes, DEPTH, abreast,
            count, 0, room, sums, abreast * STRIP, next_ + behind * STRIP, next_ + ones
        )  # fmt: skip
        for n in range(abreast):
            by = codes + n * strip_bytes + ones + 4 * STRIP * (1 + place)
            out, out_len = y + 4 * (strip + n) * STRIP, num_outputs
            if strip + n >= full:
                out, out_len = beyond, STRIP
            for row in range(num_rows):
                scale = splat(get(scales, row * num_scales))
                for i in range(0, STRIP, LANES):
                    sum_ = load(sums, (row * abreast + n) * STRIP + i)
                    part = mul(mul(sum_, scale), load(by, i))
                    before = load(out, row * out_len + i) if at != 0 else splat(f32(0.0))
                    store(out, row * out_len + i, add(before, part))
        strip += abreast
