"""Quantised weights in canonical form: a named group of tensors, and the numbers that it stands for.

Every tensor of a group is [..., O, n]: rows of outputs, so that rows are taken, joined and stacked alike.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 8 to 15 are their negatives
# The dtype of codes by kind.
CODES = {"e4m3": E4M3, "e2m1": torch.uint8, "int8": torch.int8, "int4": torch.int8}
ROW = "row"  # in the place of a span
# What may stand beside codes and scales: zero points; one factor, or one divisor, of all scales of a row.
OTHERS = ("zeros", "factor", "divisor")
# What a layer's inputs are rounded to e4m3 by: a scale for each token and SPAN inputs, for each token, or one
# of the checkpoint's for all; plugins/inputs.py. "": they stay as wide as they come.
INPUTS = ("", "group", "token", "static")
_BY = " x e4m3 by "


class Layout(NamedTuple):
    """What a group consists of."""

    kind: str  # one of CODES
    span: int  # neighbouring inputs that share a scale; 0: all of a row
    others: tuple[str, ...] = ()  # of OTHERS
    inputs: str = ""  # of INPUTS

    def __str__(self) -> str:
        weight = " ".join((self.kind, str(self.span or ROW), *self.others))
        return weight + (_BY + self.inputs if self.inputs else "")

    @staticmethod
    def parse(text: str) -> "Layout":
        """Raises ValueError for what is no layout."""
        weight, by, inputs = text.partition(_BY)
        kind, _, rest = weight.partition(" ")
        span, *others = rest.split(" ")
        known = span == ROW or (span.isdecimal() and len(span) < 10 and span[0] != "0")
        known &= inputs in (INPUTS[1:] if by else INPUTS[:1])
        if kind not in CODES or not known or any(name not in OTHERS for name in others):
            raise ValueError(f"{text!r} is no layout of a quantised weight")
        return Layout(kind, 0 if span == ROW else int(span), tuple(others), inputs)


class WeightGroup(NamedTuple):
    """A quantised weight [..., O, F]."""

    layout: Layout
    # codes [..., O, F], scales and zeros [..., O, ceil(F / span)], factor or divisor [..., O, 1]; input
    # [..., O, 1], the static scale of a matrix's inputs, the same in all of its rows
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def empty(layout: Layout, shape: tuple[int, ...]) -> "WeightGroup":
        """One without memory."""
        *outer, num_inputs = shape
        num_spans = -(-num_inputs // layout.span) if layout.span else 1
        narrow = E4M3 if layout.kind == "e2m1" else torch.float32
        widths = {"codes": (num_inputs, CODES[layout.kind]), "scales": (num_spans, narrow)}
        others = {"zeros": (num_spans, torch.int16)}
        beside = (*layout.others, *(["input"] if layout.inputs == "static" else []))
        widths |= {name: others.get(name, (1, torch.float32)) for name in beside}
        made = {n: torch.empty((*outer, w), dtype=dtype, device="meta") for n, (w, dtype) in widths.items()}
        return WeightGroup(layout, made)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["codes"].shape)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "WeightGroup":
        """`function` of every tensor; it may move rows, and nothing within a row."""
        return WeightGroup(self.layout, {name: function(tensor) for name, tensor in self.tensors.items()})

    def columns(self, begin: int, end: int) -> "WeightGroup":
        """These inputs, whole spans."""
        span = self.layout.span or self.shape[-1]
        spans = slice(begin // span, -(-end // span))
        cuts = {"codes": slice(begin, end), "scales": spans, "zeros": spans}
        made = {name: tensor[..., cuts.get(name, slice(None))] for name, tensor in self.tensors.items()}
        return WeightGroup(self.layout, made)


def joined(
    groups: Sequence[WeightGroup], function: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat
) -> WeightGroup:
    """Groups of one layout as one, along the first dimension."""
    assert len({group.layout for group in groups}) == 1
    names = groups[0].tensors
    return WeightGroup(groups[0].layout, {n: function([group.tensors[n] for group in groups]) for n in names})


def factors(group: WeightGroup) -> torch.Tensor:
    """What codes are multiplied with, [..., O, ceil(F / span)] fp32, rounded once."""
    scales = group.tensors["scales"].float()
    if "factor" in group.tensors:
        return scales * group.tensors["factor"]
    return scales / group.tensors["divisor"] if "divisor" in group.tensors else scales


def numbers(group: WeightGroup) -> torch.Tensor:
    """What the codes stand for, [..., O, F] fp32."""
    codes = group.tensors["codes"]
    if group.layout.kind != "e2m1":
        return codes.float()
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[codes.long()]


def dequantised(group: WeightGroup) -> torch.Tensor:
    """The weight, [..., O, F] fp32: (number - zero point) * scale, the product rounded once."""

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.repeat_interleave(group.layout.span or group.shape[-1], -1)[..., : group.shape[-1]]

    values = numbers(group)
    if "zeros" in group.tensors:
        values = values - spread(group.tensors["zeros"].float())
    return values * spread(factors(group))
