"""One scale beside a weight of 8 bits: ModelOpt FP8 (tensor, channel, block) and compressed-tensors W8A8.

X.weight e4m3 or int8 [O, F]; X.weight_scale [], [1], [O], [O, 1], or one for each block. Scales of
activations (input_scale) are not read: activations stay wide.
"""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module, Stored, by_row, has
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "weight_scale"
KINDS = {"F8_E4M3": "e4m3", "I8": "int8"}
FLOATS = ("F32", "BF16", "F16")


def find(module: Module, declared: Declared) -> LazyGroup:
    scales, num_outputs = module.of(KEY), module.num_outputs
    if scales.shape not in ((), (1,), (num_outputs,), (num_outputs, 1)):
        return in_blocks(module, scales, declared.block)
    weight, kind = _weight(module)
    scales.require(*FLOATS)
    layout = Layout(kind, 0)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        rows = by_row(scales.scales(), num_outputs)[begin:end]
        return WeightGroup(layout, {"codes": _codes(weight, begin, end), "scales": rows})

    return LazyGroup(layout, read)


def in_blocks(module: Module, scales: Stored, block: tuple[int, int]) -> LazyGroup:
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

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        if outer:  # lines are matrices
            own = scales.scales(begin, end).view(-1, *grid[1:])
            rows = own.repeat_interleave(height, -2)[..., :num_outputs, :]
        else:
            last = num_outputs if end is None else min(end, num_outputs)
            first = begin // height
            own = scales.scales().view(grid)[first : -(-last // height)].repeat_interleave(height, 0)
            rows = own[begin - first * height : last - first * height]
        return WeightGroup(layout, {"codes": _codes(weight, begin, end), "scales": rows.contiguous()})

    return LazyGroup(layout, read)


def _weight(module: Module) -> tuple[Stored, str]:
    weight = module.of("weight")
    weight.require(*KINDS)
    weight.require_shape(*module.shape)
    return weight, KINDS[weight.dtype]


def _codes(weight: Stored, begin: int, end: int | None) -> torch.Tensor:
    return weight.e4m3(begin, end) if weight.dtype == "F8_E4M3" else weight.read(begin, end)


FORMATS = (
    Format(
        "FP8 or INT8 with scales",
        ("modelopt", "compressed-tensors"),
        frozenset(("weight", "weight_scale", "input_scale")),
        has(KEY),
        find,
    ),
)
