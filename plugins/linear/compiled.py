"""The dense layer, compiled: every output is one chain of fused multiply-adds in the order of the inputs.

Tokens are taken in blocks, the inner dimension in stretches of DEPTH, outputs in strips. Weights that came as
bfloat16 stay so in memory, for decoding runs at its speed.
"""

import torch

from hemiola.plugins.cpu.jit import Kernel, helper, lines
from hemiola.plugins.cpu.simd import LANES, add, f32, get, load, put, splat, store
from hemiola.plugins.cpu.tiles import ABREAST, DEPTH, FEW, HEIGHT, STRIP, VECTORS, tile_of_floats, tile_of_halves, widen

BLOCK = 144  # most tokens of an item
GROUP = 16  # most strips of an item
NONE, RELU2, SWIGLU = 0, 1, 2  # what is done to an input before it is used
SCRATCH = 4 * (BLOCK * DEPTH + DEPTH * STRIP + BLOCK * STRIP)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [..., O, F] as strips [..., O / STRIP, F, STRIP], rounded up; bfloat16 if that loses nothing."""
    *outer, num_outputs, num_inputs = weight.shape
    half = weight.to(torch.bfloat16)
    lossless = weight.dtype == torch.bfloat16
    strips = torch.nn.functional.pad(half if lossless else weight.float(), (0, 0, 0, -num_outputs % STRIP))
    strips = strips.view(*outer, -1, STRIP, num_inputs).mT
    if lossless:  # outputs j and 16 + j side by side: one load, and two vectors without a shuffle
        strips = strips.unflatten(-1, (2, LANES)).mT.flatten(-2)
    return strips.contiguous()


def linear(
    x: torch.Tensor,  # [T, F]
    packed: torch.Tensor,  # pack(weight [O, F])
    bias: torch.Tensor,  # [O], or zero-length: none
    num_outputs: int,  # O
) -> torch.Tensor:  # [T, O]
    """See reference.py."""
    num_tokens, num_inputs = x.shape
    num_strips = packed.shape[0]
    if packed.shape[1] != num_inputs or num_strips != -(-num_outputs // STRIP):
        raise ValueError(f"linear: x is {tuple(x.shape)}, the weight {tuple(packed.shape)}, {num_outputs} wanted")
    x, y = lines(x) if num_tokens else x, torch.empty(num_tokens, num_outputs)
    num_blocks, num_groups = -(-num_tokens // BLOCK), -(-num_strips // GROUP)
    halves = packed.dtype == torch.bfloat16
    _multiply(
        num_blocks * num_groups, work_of(num_tokens, packed), num_blocks, num_groups, num_tokens, x, x.stride(0),
        num_inputs, num_outputs, packed, halves, bias if bias.numel() else 0, y, scratch=SCRATCH,
    )  # fmt: skip
    return y


def work_of(num_tokens: int, packed: torch.Tensor) -> float:
    """Nanoseconds, roughly."""
    return (0.03 + 0.01 * num_tokens) * packed.numel()


@Kernel
def _multiply(
    item, scratch, num_blocks, num_groups, num_tokens, x, x_len, num_inputs, num_outputs, packed, halves, bias, y
):
    """An item is a block of tokens and a group of strips; blocks of one group follow each other."""
    group, block = item // num_blocks, item % num_blocks
    first, last = share(num_tokens, num_blocks, block)
    num_strips = (num_outputs + STRIP - 1) // STRIP
    begin, end = share(num_strips, num_groups, group)
    multiply(
        scratch, x + 4 * first * x_len, x_len, 0, NONE, last - first, num_inputs,
        packed, halves, begin, end, num_outputs, bias, y + 4 * first * num_outputs,
    )  # fmt: skip


@helper
def share(size, parts, part):
    """Where a part of 0 .. size begins and ends, all parts as large as each other."""
    return size * part // parts, size * (part + 1) // parts


@helper
def multiply(
    scratch,  # SCRATCH bytes
    x,  # address of the first row
    x_len,  # numbers from row to row
    rows,  # address of the rows' numbers, or 0: they are 0, 1, 2, ...
    activation,
    num_rows,
    num_inputs,
    packed,  # address of the weight
    halves,  # whether it is bfloat16
    begin,  # the first strip
    end,  # behind the last one
    num_outputs,
    bias,  # address, or 0
    y,  # address of the first row of all outputs
):
    """A block of rows times a group of strips."""
    panel, room = scratch, scratch + 4 * BLOCK * DEPTH
    part = room + 4 * DEPTH * STRIP
    full = min(end, num_outputs // STRIP)
    strip_len, size = num_inputs * STRIP, 2 if halves else 4
    for at in range(0, num_inputs, DEPTH):
        count = min(DEPTH, num_inputs - at)
        _fill(panel, x + 4 * at, x_len, rows, activation, num_inputs, num_rows, count)
        strip = begin
        while strip < end:
            abreast = _abreast(num_rows)
            if strip + abreast > full:
                abreast = 1
            weight = packed + size * (strip * strip_len + at * STRIP)
            if strip + abreast < end:
                ahead = size * abreast * strip_len
            else:
                ahead = size * ((begin - strip) * strip_len + DEPTH * STRIP)
            if strip < full:
                _tiles(panel, num_rows, weight, halves, strip_len, abreast, count, room, y + 4 * strip * STRIP, num_outputs, at, ahead)
            else:
                _tiles(panel, num_rows, weight, halves, strip_len, 1, count, room, part, STRIP, at, ahead)
            strip += abreast
    for row in range(num_rows):
        line = y + 4 * row * num_outputs
        if bias != 0:
            for i in range(begin * STRIP, full * STRIP, LANES):
                store(line, i, add(load(line, i), load(bias, i)))
        if full < end:
            for i in range(num_outputs - full * STRIP):
                value = get(part, row * STRIP + i)
                put(line, full * STRIP + i, value + get(bias, full * STRIP + i) if bias != 0 else value)


@helper
def _abreast(num_rows):
    return ABREAST[num_rows - 1] if num_rows <= len(ABREAST) else 1


@helper
def _fill(panel, x, x_len, rows, activation, num_inputs, num_rows, count):
    for row in range(num_rows):
        source, target = x + 4 * row * x_len, panel + 4 * row * DEPTH
        whole = count // LANES * LANES
        for i in range(0, whole, LANES):
            store(target, i, load(source, i))
        for i in range(whole, count):
            put(target, i, get(source, i))


@helper
def _tiles(panel, num_rows, weight, halves, strip_len, abreast, count, room, y, y_len, going_on, ahead):
    """All rows of a block times one strip or a few side by side."""
    soon, step = weight + ahead, 64 if halves else 128
    if halves and num_rows <= FEW:
        soon_len = 2 * strip_len
        tile_of_halves(
            num_rows, 2 * abreast, panel, weight, strip_len, count, y, y_len, going_on, soon, soon_len, step
        )
        return
    if halves:
        for i in range(0, count * STRIP, STRIP):
            widen(weight, i, room)
        weight = room
    num_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    vectors = 2 * abreast if num_rows <= len(ABREAST) else VECTORS
    for v in range(0, 2 * abreast, vectors):
        for n in range(num_tiles):
            first, last = share(num_rows, num_tiles, n)
            tile_of_floats(
                last - first, vectors, panel + 4 * first * DEPTH, weight + 64 * v, strip_len, count,
                y + 4 * (first * y_len + LANES * v), y_len, going_on, soon, 4 * strip_len, step
            )  # fmt: skip
            soon, step = weight, 0
