"""AWQ (GEMM): X.qweight I32 [F, O / 8], X.qzeros I32 [G, O / 8], X.scales [G, O]; 4 bits."""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Found, Module, unpacked
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "qweight"
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the nibbles of eight neighbouring outputs are
MIDDLE = 8


def is_awq(module: Module) -> bool:
    num_outputs, num_inputs = module.shape
    return module.of(KEY).shape == (num_inputs, num_outputs // 8) and num_outputs % 8 == 0


def find(module: Module, declared: Declared) -> Found:
    words, scales, zeros = (module.of(name) for name in (KEY, "scales", "qzeros"))
    num_outputs = module.num_outputs
    words.require("I32")
    zeros.require("I32")
    scales.require("F16", "BF16", "F32")
    num_spans = scales.shape[0] if len(scales.shape) == 2 else 0
    scales.require_shape(num_spans, num_outputs)
    span = module.span(scales, num_spans, declared.group_sizes)
    zeros.require_shape(num_spans, num_outputs // 8)
    layout = Layout("int4", span, ("zeros",))

    def read() -> WeightGroup:
        codes, points = (_in_order(each.read()) - MIDDLE for each in (words, zeros))
        tensors = {"codes": codes.T.to(torch.int8).contiguous(), "zeros": points.T.contiguous()}
        return WeightGroup(layout, tensors | {"scales": scales.scales().T.contiguous()})

    return Found(layout, read)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, O / 8] as [n, O]."""
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)
