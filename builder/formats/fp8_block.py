"""FP8 by blocks, as Qwen publishes it: X.weight e4m3 [O, F] and X.weight_scale_inv, which multiplies."""

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module, has
from hemiola.builder.formats.scaled import in_blocks

KEY = "weight_scale_inv"


def find(module: Module, declared: Declared) -> LazyGroup:
    return in_blocks(module, module.of(KEY), declared.block)


FORMATS = (
    Format(
        "FP8 by blocks",
        ("fp8",),
        frozenset(("weight", "weight_scale_inv", "input_scale")),
        has("weight_scale_inv"),
        find,
    ),
)
