"""GPTQ and AutoRound: X.qweight I32 [F * bits / 32, O], X.scales [G, O], X.qzeros I32 [G, O * bits / 32], and
X.g_idx [F], the group of each input, which must be the usual one.

The first version of the format stores zero points less one, the second as they are. Where all of them are the
middle of the codes (`sym`), they tell by themselves which one it is.
"""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Found, Module, Stored, unpacked
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "qweight"


def is_gptq(module: Module) -> bool:
    """Or AWQ, which packs the outputs of an input into a word."""
    return bool(_bits(module))


def find(module: Module, declared: Declared) -> Found:
    words, scales, zeros = (module.of(name) for name in (KEY, "scales", "qzeros"))
    num_outputs = module.num_outputs
    bits = _bits(module)
    words.require("I32")
    zeros.require("I32")
    scales.require("F16", "BF16", "F32")
    num_spans = scales.shape[0] if len(scales.shape) == 2 else 0
    scales.require_shape(num_spans, num_outputs)
    span = module.span(scales, num_spans, declared.group_sizes)
    zeros.require_shape(num_spans, -(-num_outputs * bits // 32))
    module.refuse_order("g_idx", span)
    if not declared.symmetric and declared.zero_version != 2:
        raise zeros.refused(
            "has zero points of GPTQ's first version with sym = false, in which a zero point of 0 is lost",
            "save the checkpoint with checkpoint_format gptq_v2",
        )
    layout = Layout(f"int{bits}", span, () if declared.symmetric else ("zeros",))
    middle = 1 << (bits - 1)

    def read() -> WeightGroup:
        codes = unpacked(words.read().T.contiguous(), bits) - middle
        tensors = {"codes": codes.to(torch.int8), "scales": scales.scales().T.contiguous()}
        points = unpacked(zeros.read(), bits)[:, :num_outputs]
        if declared.symmetric:
            _check_middle(zeros, points, middle)
        else:
            tensors["zeros"] = (points - middle).T.contiguous()
        return WeightGroup(layout, tensors)

    return Found(layout, read)


def _bits(module: Module) -> int:
    num_outputs, num_inputs = module.shape
    shape = module.of(KEY).shape
    return next((bits for bits in (4, 8) if shape == (num_inputs * bits // 32, num_outputs)), 0)


def _check_middle(zeros: Stored, points: torch.Tensor, middle: int) -> None:
    found = points.unique().tolist()
    if found not in ([middle], [middle - 1]):
        raise zeros.refused(
            f"has zero points {found[:4]}, but config.json says sym = true; all would be {middle} or"
            f" {middle - 1}",
            "correct one of them",
        )
