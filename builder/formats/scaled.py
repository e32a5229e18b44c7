"""One scale beside a weight of 8 bits: ModelOpt FP8 (tensor, channel, block) and compressed-tensors W8A8.

X.weight e4m3 or int8 [O, F]; X.weight_scale [], [1], [O], [O, 1], or one for each block; beside int8 perhaps
X.weight_zero_point, int8 as well. Scales and zero points of activations are not read: activations stay wide.
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
    zeros, weight = module.tensors.get("weight_zero_point"), module.of("weight")
    is_in_blocks = scales.shape not in (*module.of_all, (num_outputs,), (num_outputs, 1))
    if zeros is not None and (is_in_blocks or weight.dtype != "I8"):
        reason = "stands beside FP8 codes or scales of blocks, where no zero points are read"
        raise zeros.refused(reason, "use the bf16 checkpoint", "unsupported")
    if is_in_blocks:
        return in_blocks(module, scales, declared.block)
    weight, kind = _weight(module)
    scales.require(*FLOATS)
    if zeros is not None:
        zeros.require("I8")
        zeros.require_shape(*scales.shape)
    layout = Layout(kind, 0, ("zeros",) if zeros is not None else ())

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        tensors = {"codes": _codes(weight, begin, end)}
        tensors["scales"] = by_row(scales.scales(), num_outputs)[begin:end]
        if zeros is not None:
            tensors["zeros"] = by_row(zeros.read().short(), num_outputs)[begin:end]
        return WeightGroup(layout, tensors)

    return LazyGroup(layout, read)


def in_blocks(module: Module, scales: Stored, block: tuple[int, int]) -> LazyGroup:
    """[ceil(O / height), ceil(F / width)] scales, or ModelOpt's [.., 1, .., 1]."""
    weight, kind = _weight(module)
    scales.require(*FLOATS)
    num_outputs, num_inputs = module.shape
    height, width = min(block[0], num_outputs), block[1]  # configs may say any number
    grid = (-(-num_outputs // height), -(-num_inputs // width))
    if scales.shape != (grid[0], 1, grid[1], 1):
        scales.require_shape(*grid)
    layout = Layout(kind, width if grid[1] > 1 else 0)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        last = num_outputs if end is None else min(end, num_outputs)
        first = begin // height
        block_scales = scales.scales().view(grid)[first : -(-last // height)].repeat_interleave(height, 0)
        rows = block_scales[begin - first * height : last - first * height].contiguous()
        return WeightGroup(layout, {"codes": _codes(weight, begin, end), "scales": rows})

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
        frozenset(("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")),
        has(KEY),
        find,
    ),
)
