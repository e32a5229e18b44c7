"""GPTQ and AutoRound: X.qweight I32 [F * bits / 32, O], X.scales [G, O], X.qzeros I32 [G, O * bits / 32], and
X.g_idx [F], the group of each input, which must be the usual one.

The first version of the format stores zero points less one, the second as they are. Where all of them are the
middle of the codes (`sym`), they tell by themselves which one it is.
"""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module, Stored, centred, unpacked
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "qweight"


def is_gptq(module: Module) -> bool:
    """Or AWQ, which packs the outputs of an input into a word."""
    return KEY in module.tensors and bool(_bits(module))


def find(module: Module, declared: Declared) -> LazyGroup:
    bits, num_outputs = _bits(module), module.num_outputs
    width = -(-num_outputs * bits // 32)
    words, scales, zeros, span = module.packed_words(declared.group_sizes, width)
    module.refuse_order("g_idx", span)
    if not declared.symmetric and declared.zero_version != 2:
        raise zeros.refused(
            "has zero points of GPTQ's first version with sym = false, in which a zero point of 0 is lost",
            "save the checkpoint with checkpoint_format gptq_v2",
            "unsupported",
        )
    layout = Layout(f"int{bits}", span, () if declared.symmetric else ("zeros",))
    middle = 1 << (bits - 1)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        codes = centred(unpacked(words.read(begin, end, 1).T, bits), middle)
        tensors = {"codes": codes, "scales": scales.scales(begin, end, 1).T.contiguous()}
        points = unpacked(zeros.read(), bits).short()[:, :num_outputs][:, begin:end]
        if declared.symmetric:
            _check_middle(zeros, points, middle)
        else:
            tensors["zeros"] = (points - middle).T.contiguous()
        return WeightGroup(layout, tensors)

    return LazyGroup(layout, read)


def _bits(module: Module) -> int:
    num_outputs, num_inputs = module.shape
    shape = module.of(KEY).shape
    return next((bits for bits in (4, 8) if shape == (num_inputs * bits // 32, num_outputs)), 0)


def _check_middle(zeros: Stored, points: torch.Tensor, middle: int) -> None:
    zero_points = points.unique().tolist()
    if zero_points not in ([middle], [middle - 1]):
        raise zeros.refused(
            f"has zero points {zero_points[:4]}, but config.json says sym = true; all would be {middle} or"
            f" {middle - 1}",
            "correct one of them",
            "conflict",
        )


FORMATS = (
    Format(
        "GPTQ or AutoRound",
        ("gptq", "auto-round"),
        frozenset(("qweight", "scales", "qzeros", "g_idx")),
        is_gptq,
        find,
    ),
)
