"""Weights whose inputs are e4m3, too, as kernels for GPUs read them: lines of codes, then scales.

A matrix is one row of bytes: codes [O, F], lines filled up to whole STEPs with zeros; scales [spans, O] fp32;
the static scale of its inputs, if it has one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hemiola.plugins.groups import E4M3, Layout, WeightGroup, factors
from hemiola.plugins.inputs import SPAN, refuses_inputs

ALIGNMENT = 64  # bytes of a matrix and its sections


class CodeLines(NamedTuple):
    """A packed weight's sections, [..., n]; `static` is the scales again where there is none."""

    codes: torch.Tensor  # e4m3
    scales: torch.Tensor  # fp32
    static: torch.Tensor  # fp32
    width: int  # codes of a line
    span: int  # of them that share a scale


def refuses_wide(layout: Layout) -> str:
    """Of what `pack_lines` takes: inputs that are wide, too."""
    return refuses_inputs(layout) if layout.inputs else "its inputs are not e4m3"


def _sizes(layout: Layout, num_outputs: int, num_inputs: int) -> list[int]:
    """Bytes of each section."""
    width = -(-num_inputs // SPAN) * SPAN
    num_spans = -(-num_inputs // layout.span) if layout.span else 1
    sizes = [num_outputs * width, 4 * num_spans * num_outputs, 4 * (layout.inputs == "static")]
    return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]


def num_bytes(layout: Layout, num_outputs: int, num_inputs: int) -> int:
    """Of a matrix."""
    return sum(_sizes(layout, num_outputs, num_inputs))


def random_lines(layout: Layout, shape: Sequence[int], std: float, rng: torch.Generator) -> torch.Tensor:
    """A packed weight [..., O, F] of random codes whose numbers have this standard deviation; a static scale
    of inputs fits those of size 1."""
    *outer, num_outputs, num_inputs = shape
    size = (*outer, num_bytes(layout, num_outputs, num_inputs) // 4)
    ints = torch.randint(-(2**31), 2**31, size, generator=rng, device=rng.device, dtype=torch.int32)
    made, narrow = ints.view(torch.uint8), 0xBF  # below 2, and no NaN
    every = (torch.arange(256, dtype=torch.uint8) & narrow).view(E4M3).float()
    found = sections(made, layout, num_outputs, num_inputs)
    found.codes.view(torch.uint8).bitwise_and_(narrow)
    found.scales.fill_(std / every.square().mean().sqrt().item())
    if layout.inputs == "static":
        found.static.fill_(2.0**-7)
    return made


def pack_lines(group: WeightGroup) -> torch.Tensor:
    """A weight [..., O, F] as [..., bytes], uint8."""
    *outer, num_outputs, num_inputs = group.shape
    codes = group.tensors["codes"].view(torch.uint8)
    parts = [torch.nn.functional.pad(codes, (0, -num_inputs % SPAN)), factors(group).mT.contiguous()]
    if group.layout.inputs == "static":
        parts.append(group.tensors["input"][..., :1, :].contiguous())
    sizes = _sizes(group.layout, num_outputs, num_inputs)
    made = torch.zeros(*outer, sum(sizes), dtype=torch.uint8, device=codes.device)
    at = 0
    for part, size in zip(parts, sizes, strict=False):
        flat = part.flatten(-2).view(torch.uint8)
        made[..., at : at + flat.shape[-1]] = flat
        at += size
    return made


def sections(packed: torch.Tensor, layout: Layout, num_outputs: int, num_inputs: int) -> CodeLines:
    """Views of a packed weight. Raises ValueError where this is not packed from [.., O, F]."""
    sizes = _sizes(layout, num_outputs, num_inputs)
    if packed.dtype is not torch.uint8 or packed.shape[-1] != sum(sizes):
        raise ValueError(
            f"linear: {packed.dtype} {list(packed.shape)} is not packed from {num_outputs} outputs of"
            f" {num_inputs} inputs in {layout}, which take {sum(sizes)} bytes"
        )
    codes, scales, static = packed.split(sizes, -1)
    width = -(-num_inputs // SPAN) * SPAN
    found = scales.view(torch.float32)
    one = static.view(torch.float32) if layout.inputs == "static" else found
    return CodeLines(codes.view(E4M3), found, one, width, layout.span or width)
