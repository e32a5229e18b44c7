"""The formats of quantised checkpoints: which tensors each has, and how they become a canonical group.

A format is a file: `find(module, declared)` checks names, dtypes and shapes, and promises a group. Tensors
decide; configs may only confirm. docs/engines.md lists them.
"""

from collections.abc import Callable
from typing import NamedTuple

from hemiola.builder.formats import awq, fp8_block, gptq, nvfp4, packed, scaled
from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Found, Module
from hemiola.runtime.errors import Refused


class Format(NamedTuple):
    name: str
    methods: tuple[str, ...]  # as which configs declare it
    tensors: frozenset[str]  # that a matrix may have, by the ends of their names
    is_it: Callable[[Module], bool]
    find: Callable[[Module, Declared], Found]


def _has(suffix: str) -> Callable[[Module], bool]:
    return lambda module: suffix in module.tensors


# The first that recognises a matrix has it.
FORMATS = (
    Format(
        "FP8 by blocks",
        ("fp8",),
        frozenset(("weight", "weight_scale_inv", "input_scale")),
        _has("weight_scale_inv"),
        fp8_block.find,
    ),
    Format(
        "GPTQ or AutoRound",
        ("gptq", "auto-round"),
        frozenset(("qweight", "scales", "qzeros", "g_idx")),
        lambda module: "qweight" in module.tensors and gptq.is_gptq(module),
        gptq.find,
    ),
    Format(
        "AWQ",
        ("awq", "auto-round"),
        frozenset(("qweight", "scales", "qzeros")),
        lambda module: "qweight" in module.tensors and awq.is_awq(module),
        awq.find,
    ),
    Format(
        "NVFP4 of compressed-tensors",
        ("compressed-tensors",),
        frozenset(("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")),
        _has("weight_global_scale"),
        nvfp4.find_compressed,
    ),
    Format(
        "packed integers of compressed-tensors",
        ("compressed-tensors",),
        frozenset(("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
        _has("weight_packed"),
        packed.find,
    ),
    Format(
        "NVFP4 of ModelOpt",
        ("modelopt",),
        frozenset(("weight", "weight_scale", "weight_scale_2", "input_scale")),
        _has("weight_scale_2"),
        nvfp4.find_modelopt,
    ),
    Format(
        "FP8 or INT8 with scales",
        ("modelopt", "compressed-tensors"),
        frozenset(("weight", "weight_scale", "input_scale")),
        _has("weight_scale"),
        scaled.find,
    ),
)
PLAIN = ("BF16", "F16", "F32", "F64")
# Ends of names that belong to a matrix; what its format does not have, changes what it computes.
SUFFIXES = frozenset({"pre_quant_scale"}).union(*(each.tensors for each in FORMATS))


def find(module: Module, declared: Declared) -> Found | None:
    """What a matrix is, or None: it is not quantised."""
    weight = module.tensors.get("weight")
    if set(module.tensors) == {"weight"} and weight is not None and weight.dtype in PLAIN:
        return None
    for known in FORMATS:
        if known.is_it(module):
            return _confirmed(module, declared, known)
    if "weight" in module.tensors and len(module.tensors) == 1:
        stored = module.tensors["weight"]
        raise stored.refused(f"is {stored.dtype} and has no scales beside it", "download it again")
    names = ", ".join(sorted(module.tensors))
    shapes = " and ".join(f"{name} {list(each.shape)}" for name, each in sorted(module.tensors.items()))
    raise Refused(
        f"{declared.where}: {module.name} has the tensors {names}, of no format that this version knows"
        f" ({shapes}); use the bf16 checkpoint"
    )


def _confirmed(module: Module, declared: Declared, known: Format) -> Found:
    more = sorted(set(module.tensors) - known.tensors)
    if more:
        raise module.tensors[more[0]].refused(
            f"does not belong to {known.name}, which the other tensors of {module.name} are"
        )
    if declared.method and declared.method not in known.methods:
        raise Refused(
            f"{declared.where}: quant_method is {declared.method}, but the tensors of {module.name} are"
            f" {known.name}; correct one of them"
        )
    found = known.find(module, declared)
    if declared.names and found.layout.kind not in declared.kinds:
        raise Refused(
            f"{declared.where}: weights are declared as {' and '.join(declared.names)}, but {module.name} is"
            f" {found.layout.kind}; correct one of them"
        )
    return found
