"""compressed-tensors' pack-quantized (W4A16, W8A16): X.weight_packed I32 [O, F * bits / 32], X.weight_scale,
perhaps X.weight_shape, and X.weight_zero_point, packed along the outputs, where codes have zero points."""

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module, centred, unpacked
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "weight_packed"


def is_packed(module: Module) -> bool:
    """Not NVFP4, whose words are bytes."""
    return KEY in module.tensors and module.of(KEY).dtype != "U8"


def find(module: Module, declared: Declared) -> LazyGroup:
    words, scales = module.of(KEY), module.of("weight_scale")
    num_outputs, num_inputs = module.shape
    words.require("I32")
    scales.require("F32", "BF16", "F16")
    module.refuse_other_shape("weight_shape")
    bits = next((b for b in (4, 8) if words.shape == (num_outputs, -(-num_inputs * b // 32))), 0)
    if not bits:
        raise words.refused(
            f"has shape {list(words.shape)}, which holds {num_outputs} x {num_inputs} numbers of neither 4"
            " nor 8 bits"
        )
    if scales.shape[:1] != (num_outputs,) or len(scales.shape) != 2:
        scales.require_shape(num_outputs, -(-num_inputs // min(declared.group_sizes, default=128)))
    num_spans = scales.shape[1]
    span = module.span(scales, num_spans, declared.group_sizes)
    module.refuse_order("weight_g_idx", span)
    zeros = module.tensors.get("weight_zero_point")
    if zeros is not None:
        zeros.require("I32")
        zeros.require_shape(-(-num_outputs * bits // 32), num_spans)
        module.refuse_split_words(zeros, bits)
    layout = Layout(f"int{bits}", span, ("zeros",) if zeros is not None else ())
    middle = 1 << (bits - 1)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        codes = centred(unpacked(words.read(begin, end), bits)[:, :num_inputs], middle)
        tensors = {"codes": codes, "scales": scales.scales(begin, end)}
        if zeros is not None:
            points = unpacked(zeros.read().T, bits).T[:num_outputs].short() - middle
            tensors["zeros"] = points[begin:end]
        return WeightGroup(layout, tensors)

    return LazyGroup(layout, read)


FORMATS = (
    Format(
        "packed integers of compressed-tensors",
        ("compressed-tensors",),
        frozenset(("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
        is_packed,
        find,
    ),
)
