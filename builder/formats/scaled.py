"""One scale beside a weight of 8 bits: ModelOpt FP8 (tensor, channel, block) and compressed-tensors W8A8.

X.weight e4m3 or int8 [O, F]; X.weight_scale [], [1], [O], [O, 1], or one for each block. Scales of
activations (input_scale) are not read: activations stay wide.
"""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Found, Module, Stored, by_row
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "weight_scale"
KINDS = {"F8_E4M3": "e4m3", "I8": "int8"}
FLOATS = ("F32", "BF16", "F16")


def find(module: Module, declared: Declared) -> Found:
    scales, num_outputs = module.of(KEY), module.num_outputs
    if scales.shape not in ((), (1,), (num_outputs,), (num_outputs, 1)):
        return in_blocks(module, scales, declared.block)
    weight, kind = _weight(module)
    scales.require(*FLOATS)
    layout = Layout(kind, 0)

    def read() -> WeightGroup:
        return WeightGroup(layout, {"codes": _codes(weight), "scales": by_row(scales.scales(), num_outputs)})

    return Found(layout, read)


def in_blocks(module: Module, scales: Stored, block: tuple[int, int]) -> Found:
    """[ceil(O / height), ceil(F / width)] scales, or ModelOpt's [.., 1, .., 1]; several matrices may lie
    behind each other."""
    weight, kind = _weight(module)
    scales.require(*FLOATS)
    height, width = block
    *outer, num_outputs, num_inputs = module.shape
    grid = (*outer, -(-num_outputs // height), -(-num_inputs // width))
    if scales.shape != (*outer, grid[-2], 1, grid[-1], 1):
        scales.require_shape(*grid)
    layout = Layout(kind, width if grid[-1] > 1 else 0)

    def read() -> WeightGroup:
        rows = scales.scales().view(grid).repeat_interleave(height, -2)[..., :num_outputs, :]
        return WeightGroup(layout, {"codes": _codes(weight), "scales": rows.contiguous()})

    return Found(layout, read)


def _weight(module: Module) -> tuple[Stored, str]:
    weight = module.of("weight")
    weight.require(*KINDS)
    weight.require_shape(*module.shape)
    return weight, KINDS[weight.dtype]


def _codes(weight: Stored) -> torch.Tensor:
    return weight.e4m3() if weight.dtype == "F8_E4M3" else weight.read()
