"""`build-engine --quantize`: weights of dense layers and experts are rounded when an engine is built."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hemiola.builder.formats.module import Found
from hemiola.builder.lazy import Lazy
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

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def any(self, prefix: str) -> bool:
        return self.tensors.any(prefix)

    def tensor(self, name: str, *shape: int) -> Lazy:
        return self.tensors.tensor(name, *shape)

    def matrix(self, name: str, *shape: int) -> Lazy:
        lazy = self.tensors.matrix(name, *shape)
        if lazy.layout is not None:
            raise Refused(
                f"--quantize {self.name}: {name} is quantised already ({lazy.layout}); leave --quantize out"
            )
        if KEPT.search(name) or (self.name == "nvfp4" and shape[-1] % 16):
            return lazy
        layout = LAYOUTS[self.name]
        if layout.span >= shape[-1]:
            layout = layout._replace(span=0)
        return Lazy.quantised(shape, Found(layout, lambda: rounded(lazy.read().float(), layout)))

    def leftovers(self) -> Iterable[str]:
        return self.tensors.leftovers()


def rounding(source: Callable[[Any], Any], name: str) -> Callable[[Any], RoundedTensors]:
    """`source`, with weights rounded."""
    return lambda checkpoint: RoundedTensors(source(checkpoint), name)


def rounded(weight: torch.Tensor, layout: Layout) -> WeightGroup:
    """The nearest codes of [..., O, F] fp32; each span's scale makes its largest number the largest code."""
    num_inputs = weight.shape[-1]
    span = layout.span or num_inputs
    spans = torch.nn.functional.pad(weight, (0, -num_inputs % span)).unflatten(-1, (-1, span))
    peaks = spans.abs().amax(-1) / LARGEST[layout.kind]
    tensors: dict[str, torch.Tensor] = {"codes": weight}  # for now
    if "factor" in layout.others:
        factor = _positive(weight.abs().amax((-2, -1), keepdim=True) / LARGEST[layout.kind] / LARGEST["e4m3"])
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
    size, codes = x.abs(), torch.zeros(x.shape, dtype=torch.uint8)
    for n, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        codes += (size >= middle) if n % 2 else (size > middle)
    return codes + 8 * (x < 0).to(torch.uint8)
