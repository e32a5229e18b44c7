"""Quantised weights for the compiled dense layer: how they are packed, and how they become fp32 numbers.

The strip of STRIP outputs is a row of bytes: its codes input by input (two of 4 bits in a byte: outputs j and
16 + j), then a scale of fp32 for each output and span of inputs, then zero points likewise, if there are any.
A weight is widened to the very numbers of `groups.dequantised`, so that sums are those of the fp32 weight.
"""

import math

import torch

from hemiola.plugins.cpu.codes import (
    load_high_e2m1,
    load_high_int4,
    load_int8,
    load_low_e2m1,
    load_low_int4,
)
from hemiola.plugins.cpu.e4m3 import load_e4m3
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import LANES, f32, load, mul, splat, store, sub
from hemiola.plugins.cpu.tiles import DEPTH, STRIP
from hemiola.plugins.groups import Layout, WeightGroup, factors

FLOATS, HALVES, IN_E4M3, IN_INT8, IN_INT4, IN_E2M1 = range(6)  # what a packed weight consists of
KINDS = {"e4m3": IN_E4M3, "int8": IN_INT8, "int4": IN_INT4, "e2m1": IN_E2M1}
MIDDLE = {"int4": 8}  # what codes lie above when they are packed: 0 to 15


def packed_span(layout: Layout) -> int:
    """Inputs that share a scale in a packed weight: a part of DEPTH."""
    return math.gcd(layout.span, DEPTH)  # DEPTH for a row


def strip_bytes(layout: Layout, num_inputs: int) -> int:
    half = layout.kind in ("int4", "e2m1")
    each_span = 4 * STRIP * (1 + ("zeros" in layout.others))
    return num_inputs * STRIP // (1 + half) + -(-num_inputs // packed_span(layout)) * each_span


def pack_group(group: WeightGroup) -> torch.Tensor:
    """A weight [..., O, F] as [..., ceil(O / STRIP), bytes of a strip]."""
    layout, num_inputs = group.layout, group.shape[-1]
    span = packed_span(layout)
    places = torch.arange(0, num_inputs, span) // (layout.span or num_inputs)

    def each_span(values: torch.Tensor) -> torch.Tensor:
        return values.index_select(-1, places.to(values.device))

    codes = _strips(group.tensors["codes"].view(torch.uint8))
    if layout.kind in MIDDLE:
        codes = codes + MIDDLE[layout.kind]  # of int8, as uint8
    if layout.kind in ("int4", "e2m1"):
        codes = codes[..., :LANES] | codes[..., LANES:] << 4
    parts = [codes, _strips(each_span(factors(group)))]
    if "zeros" in group.tensors:
        zeros = group.tensors["zeros"].float() + MIDDLE.get(layout.kind, 0)
        parts.append(_strips(each_span(zeros)))
    return torch.cat([part.contiguous().flatten(-2).view(torch.uint8) for part in parts], -1)


def _strips(tensor: torch.Tensor) -> torch.Tensor:
    """[..., O, n] as [..., strips, n, STRIP], outputs that are none zero."""
    *outer, num_outputs, num = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, -num_outputs % STRIP))
    return padded.view(*outer, -1, STRIP, num).mT


@helper
def widen_codes(kind, strip, num_inputs, span, has_zeros, at, count, target):
    """The weights of a strip for inputs at .. at + count become fp32 at `target`."""
    half = LANES if kind >= IN_INT4 else STRIP
    scales = strip + num_inputs * half
    zeros = scales + 4 * STRIP * ((num_inputs + span - 1) // span)
    codes = strip + at * half
    k = 0
    while k < count:
        part = (at + k) // span
        end = min(count, (part + 1) * span - at)
        a, b = load(scales, part * STRIP), load(scales, part * STRIP + LANES)
        c = splat(f32(8.0)) if kind == IN_INT4 else splat(f32(0.0))
        d = c
        if has_zeros != 0:
            c, d = load(zeros, part * STRIP), load(zeros, part * STRIP + LANES)
        if kind == IN_E4M3:
            for i in range(k * STRIP, end * STRIP, STRIP):
                store(target, i, mul(load_e4m3(codes, i), a))
                store(target, i + LANES, mul(load_e4m3(codes, i + LANES), b))
        elif kind == IN_INT8:
            for i in range(k * STRIP, end * STRIP, STRIP):
                store(target, i, mul(sub(load_int8(codes, i), c), a))
                store(target, i + LANES, mul(sub(load_int8(codes, i + LANES), d), b))
        elif kind == IN_INT4:
            for i in range(k, end):
                store(target, i * STRIP, mul(sub(load_low_int4(codes, i * LANES), c), a))
                store(target, i * STRIP + LANES, mul(sub(load_high_int4(codes, i * LANES), d), b))
        else:
            for i in range(k, end):
                store(target, i * STRIP, mul(load_low_e2m1(codes, i * LANES), a))
                store(target, i * STRIP + LANES, mul(load_high_e2m1(codes, i * LANES), b))
        k = end
