"""Rounding when an engine is built: `--quantize` of dense layers and experts, `--draft-head` of a copy of the
output head."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from hemiola.builder.formats.declared import GROUP
from hemiola.builder.formats.module import LazyGroup
from hemiola.builder.lazy import PIECE, Lazy, Read
from hemiola.plugins.groups import E2M1, E4M3, Layout, WeightGroup, factors
from hemiola.runtime.errors import Refused

SPAN = 128  # inputs that share a scale, but for NVFP4
# What a scale makes of the largest number of a span.
LARGEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "e2m1": 6.0}
LAYOUTS = {
    "fp8": Layout("e4m3", SPAN),
    "int8": Layout("int8", SPAN),
    "int4": Layout("int4", SPAN),
    "nvfp4": Layout("e2m1", 16, ("factor",)),
}
# As releases do: output heads, what an MTP head enters by, and the few rows of gates stay as they are.
KEPT = re.compile(r"(lm_head|mtp\.fc|eh_proj|in_proj_(ba|a|b))\.weight$")
LEAST = 2.0**-9  # the least scale that e4m3 has


@dataclass(frozen=True)
class RoundedTensors:
    """A checkpoint's tensors, weights of matrices rounded."""

    tensors: Any  # of checkpoint.Tensors
    name: str  # of LAYOUTS
    narrow_inputs: bool  # of weights in e4m3

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def any(self, prefix: str) -> bool:
        return self.tensors.any(prefix)

    def tensor(self, name: str, *shape: int) -> Lazy:
        return self.tensors.tensor(name, *shape)

    def matrix(self, name: str, *shape: int) -> Lazy:
        lazy = self.tensors.matrix(name, *shape)
        if lazy.layout is not None:
            message = f"--quantize {self.name}: {name} is quantised already ({lazy.layout})"
            raise Refused("conflict", "quantize", message=message, way_out="leave --quantize out")
        if KEPT.search(name) or (self.name == "nvfp4" and shape[-1] % 16):
            return lazy
        return quantised(lazy, self.name, self.narrow_inputs)

    def leftovers(self) -> Iterable[str]:
        return self.tensors.leftovers()


def _reader(lazy: Lazy, layout: Layout) -> Read[WeightGroup]:
    """Rounds the lines that are read."""
    is_matrix = len(lazy.shape) == 2

    @cache
    def peak() -> torch.Tensor:
        """The largest number of a matrix, whose lines have one factor."""
        return torch.stack([piece.abs().amax() for piece in lazy.pieces(PIECE)]).amax().float().view(1, 1)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        weight = lazy.read(begin, end).float()
        return rounded(weight, layout, peak() if is_matrix and "factor" in layout.others else None)

    return read


def rounding(source: Callable[[Any], Any], name: str) -> Callable[[Any], RoundedTensors]:
    """`source`, with weights rounded."""
    return lambda checkpoint: RoundedTensors(source(checkpoint), name, checkpoint.narrow_inputs)


def quantised(weight: Lazy, name: str, narrow: bool = False) -> Lazy:
    """A plain weight [..., O, F] in codes of LAYOUTS[name]; narrow: inputs of e4m3 codes are e4m3, too."""
    layout = LAYOUTS[name]
    if layout.span >= weight.shape[-1]:
        layout = layout._replace(span=0)
    if narrow and layout.kind == "e4m3":
        layout = layout._replace(inputs=GROUP)
    return Lazy.quantised(weight.shape, LazyGroup(layout, _reader(weight, layout)), weight.std)


def rounded(weight: torch.Tensor, layout: Layout, peak: torch.Tensor | None = None) -> WeightGroup:
    """The nearest codes of [..., O, F] fp32; each span's scale makes its largest number the largest code.
    peak: the largest number of the matrix of which these are rows, [1, 1]."""
    num_inputs = weight.shape[-1]
    span = layout.span or num_inputs
    spans = torch.nn.functional.pad(weight, (0, -num_inputs % span)).unflatten(-1, (-1, span))
    peaks = spans.abs().amax(-1) / LARGEST[layout.kind]
    tensors: dict[str, torch.Tensor] = {"codes": weight}  # for now
    if "factor" in layout.others:
        peak = weight.abs().amax((-2, -1), keepdim=True) if peak is None else peak
        factor = _positive(peak / LARGEST[layout.kind] / LARGEST["e4m3"])
        tensors["scales"] = (peaks / factor).clamp(LEAST, LARGEST["e4m3"]).to(E4M3)
        tensors["factor"] = factor.expand(*weight.shape[:-1], 1).contiguous()
    else:
        tensors["scales"] = _positive(peaks)
    scales = factors(WeightGroup(layout, tensors)).repeat_interleave(span, -1)[..., :num_inputs]
    tensors["codes"] = _nearest(weight / scales, layout.kind)
    return WeightGroup(layout, tensors)


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """1 for spans of zeros, and of numbers too small for a normal scale."""
    return torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)


def _nearest(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes, even ones of two that are as near."""
    largest = LARGEST[kind]
    if kind == "e4m3":
        return x.clamp(-largest, largest).to(E4M3)
    if kind != "e2m1":
        return x.round().clamp(-largest - 1, largest).to(torch.int8)
    size, codes = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for n, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        codes += (size >= middle) if n % 2 else (size > middle)
    return codes + 8 * (x < 0).to(torch.uint8)
