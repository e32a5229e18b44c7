"""NVFP4: e2m1 codes, an e4m3 scale for 16 inputs and one number for all scales.

ModelOpt: X.weight U8 [O, F / 2], X.weight_scale, X.weight_scale_2, which multiplies. compressed-tensors:
X.weight_packed, X.weight_scale, X.weight_global_scale, which divides.
"""

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import MOST, Format, LazyGroup, Module, by_row, has, nibbles
from hemiola.plugins.groups import Layout, WeightGroup

GROUP = 16


def find_modelopt(module: Module, declared: Declared) -> LazyGroup:
    return _find(module, "weight", "weight_scale_2", "factor")


def is_compressed(module: Module) -> bool:
    packed = module.tensors.get("weight_packed")
    return "weight_global_scale" in module.tensors or (packed is not None and packed.dtype == "U8")


def find_compressed(module: Module, declared: Declared) -> LazyGroup:
    return _find(module, "weight_packed", "weight_global_scale", "divisor")


def _find(module: Module, weight_name: str, whole_name: str, role: str) -> LazyGroup:
    weight, scales, whole = (module.of(name) for name in (weight_name, "weight_scale", whole_name))
    num_outputs, num_inputs = module.shape
    weight.require("U8")
    scales.require("F8_E4M3")
    whole.require("F32")
    weight.require_shape(num_outputs, num_inputs // 2)
    scales.require_shape(num_outputs, -(-num_inputs // GROUP))
    if whole.shape not in module.of_all:
        whole.require_shape()
    if num_inputs % GROUP:
        raise weight.refused(f"has {num_inputs} inputs, no multiple of {GROUP}")
    layout = Layout("e2m1", GROUP, (role,))

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        scales.scales(begin, end)
        codes = nibbles(weight.read(begin, end))
        tensors = {"codes": codes, "scales": scales.read(begin, end)}
        number = whole.scales()
        if role == "divisor" and bool((number < 1 / MOST).any()):
            raise whole.refused(
                f"holds {float(number.min()):g}, by which a scale is divided: beyond {MOST:g}"
            )
        return WeightGroup(layout, tensors | {role: by_row(number, num_outputs)[begin:end]})

    return LazyGroup(layout, read)


FORMATS = (
    Format(
        "NVFP4 of compressed-tensors",
        ("compressed-tensors",),
        frozenset(("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")),
        is_compressed,
        find_compressed,
    ),
    Format(
        "NVFP4 of ModelOpt",
        ("modelopt",),
        frozenset(("weight", "weight_scale", "weight_scale_2", "input_scale")),
        has("weight_scale_2"),
        find_modelopt,
    ),
)
