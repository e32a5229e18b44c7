"""Quantised weights for the compiled dense layer: how they are packed, and how they become fp32 numbers.

The strip of STRIP outputs is a row of bytes: its codes input by input (two of 4 bits in a byte: outputs j and
16 + j; those of int4 have a sign), then a scale of fp32 for each output and span of inputs, then zero points
likewise, if there are any.
A weight is widened to the very numbers of `groups.dequantised`, so that sums are those of the fp32 weight.

Where inputs are e4m3, too (plugins/inputs.py), codes are widened by themselves: behind them are STRIP ones as
their scales, then the scales of sums, for each SPAN of inputs or for all, then STRIP times a static scale.
"""

import math

import torch

from hemiola.plugins.cpu.code_tiles import (
    E2M1_CODES,
    E4M3_CODES,
    INT4_CODES,
    INT4_WITH_ZEROS,
    INT8_CODES,
    INT8_WITH_ZEROS,
    tile_of,
    widen_of,
)
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import LANES
from hemiola.plugins.cpu.tiles import DEPTH, STRIP
from hemiola.plugins.groups import Layout, WeightGroup, factors

FLOATS, HALVES, IN_E4M3, IN_INT8, IN_INT4, IN_E2M1 = range(6)  # what a packed weight consists of
KINDS = {"e4m3": IN_E4M3, "int8": IN_INT8, "int4": IN_INT4, "e2m1": IN_E2M1}
# How codes become numbers, by 2 * what a weight consists of, and 1 more with zero points.
TABLE = {
    2 * IN_E4M3: E4M3_CODES,
    2 * IN_INT8: INT8_CODES,
    2 * IN_INT8 + 1: INT8_WITH_ZEROS,
    2 * IN_INT4: INT4_CODES,
    2 * IN_INT4 + 1: INT4_WITH_ZEROS,
    2 * IN_E2M1: E2M1_CODES,
}
tile_of_codes, widen = tile_of(TABLE), widen_of(TABLE)


def packed_span(layout: Layout) -> int:
    """Inputs that share a scale in a packed weight: a part of DEPTH."""
    return math.gcd(layout.span, DEPTH)  # DEPTH for a row


def strip_bytes(layout: Layout, num_inputs: int) -> int:
    if layout.inputs:
        num_others = 1 + _num_scales(layout, num_inputs) + (layout.inputs == "static")
        return num_inputs * STRIP + 4 * STRIP * num_others
    half = layout.kind in ("int4", "e2m1")
    each_span = 4 * STRIP * (1 + ("zeros" in layout.others))
    return num_inputs * STRIP // (1 + half) + -(-num_inputs // packed_span(layout)) * each_span


def _num_scales(layout: Layout, num_inputs: int) -> int:
    """Of sums, where inputs are e4m3."""
    return -(-num_inputs // layout.span) if layout.span else 1


def pack_group(group: WeightGroup) -> torch.Tensor:
    """A weight [..., O, F] as [..., ceil(O / STRIP), bytes of a strip]."""
    if group.layout.inputs:
        return _pack_for_e4m3(group)
    layout, num_inputs = group.layout, group.shape[-1]
    span = packed_span(layout)
    places = torch.arange(0, num_inputs, span) // (layout.span or num_inputs)

    def each_span(values: torch.Tensor) -> torch.Tensor:
        return values.index_select(-1, places.to(values.device))

    codes = _strips(group.tensors["codes"].view(torch.uint8))
    if layout.kind in ("int4", "e2m1"):
        codes = codes[..., :LANES] & 15 | codes[..., LANES:] << 4
    parts = [codes, _strips(each_span(factors(group)))]
    if "zeros" in group.tensors:
        parts.append(_strips(each_span(group.tensors["zeros"].float())))
    return torch.cat([part.contiguous().flatten(-2).view(torch.uint8) for part in parts], -1)


def _pack_for_e4m3(group: WeightGroup) -> torch.Tensor:
    scales = factors(group)
    parts = [group.tensors["codes"].view(torch.uint8), torch.ones_like(scales[..., :1]), scales]
    if group.layout.inputs == "static":
        # of outputs that are none, too: a kernel reads the first
        parts.append(group.tensors["input"])
    strips = (_strips(part).contiguous().flatten(-2).view(torch.uint8) for part in parts)
    return torch.cat([*strips], -1)


def _strips(tensor: torch.Tensor) -> torch.Tensor:
    """[..., O, n] as [..., strips, n, STRIP], outputs that are none zero."""
    *outer, num_outputs, num = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, -num_outputs % STRIP))
    return padded.view(*outer, -1, STRIP, num).mT


@helper
def _which(kind, zeros):
    """Its place in TABLE. Zero points beside codes that have none change nothing."""
    return 2 * kind + (1 if zeros != 0 and kind in (IN_INT8, IN_INT4) else 0)


@helper
def narrow_tile(
    kind, num_rows, strips, panel, codes, scales, zeros, strip_bytes, span, count, y, y_len, going_on,
    codes_soon, scales_soon
):  # fmt: skip
    """Few rows times strips side by side; codes are widened in registers."""
    tile_of_codes(
        _which(kind, zeros), num_rows, strips, panel, codes, scales, zeros, strip_bytes, span, count, y,
        y_len, going_on, codes_soon, scales_soon
    )  # fmt: skip


@helper
def widen_codes(kind, codes, scales, zeros, span, count, target, codes_soon, scales_soon):
    """The weights of a strip for `count` inputs become fp32 at `target`."""
    widen(_which(kind, zeros), codes, scales, zeros, span, count, target, codes_soon, scales_soon)


@helper
def places(kind, strip, num_inputs, span, has_zeros, at):
    """Addresses of codes, scales and zero points (0: none) from input `at` on, where a span begins."""
    size = LANES if kind >= IN_INT4 else STRIP
    first = strip + num_inputs * size
    scales = first + 4 * STRIP * (at // span)
    all_scales = 4 * STRIP * ((num_inputs + span - 1) // span)
    return strip + at * size, scales, scales + all_scales if has_zeros != 0 else 0
