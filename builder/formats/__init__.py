"""The formats of quantised checkpoints: which tensors each has, and how they become a canonical group.

A format is a file with `FORMATS`: `find(module, declared)` checks names, dtypes and shapes, and promises a
group. Tensors decide; configs may only confirm. docs/engines.md lists them.
"""

from importlib import import_module
from pathlib import Path

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module
from hemiola.runtime.errors import Refused


def _declared(file: str) -> tuple[Format, ...]:
    return getattr(import_module(f"hemiola.builder.formats.{file}"), "FORMATS", ())


_FILES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
FORMATS = tuple(each for file in _FILES for each in _declared(file))
METHODS = tuple(sorted({method for each in FORMATS for method in each.methods}))
PLAIN = ("BF16", "F16", "F32", "F64")
# Ends of names that belong to a matrix; what its format does not have, changes what it computes.
SUFFIXES = frozenset({"pre_quant_scale"}).union(*(each.tensors for each in FORMATS))


def is_plain(module: Module) -> bool:
    """It is not quantised, or not there."""
    return all(end == "weight" and stored.dtype in PLAIN for end, stored in module.tensors.items())


def find(module: Module, declared: Declared) -> LazyGroup:
    """What a matrix is that is not plain."""
    if known := [each for each in FORMATS if each.is_it(module)]:
        # several know weight_scale: a matrix is of the format that knows the most of its tensors
        best = max(known, key=lambda each: len(each.tensors & module.tensors.keys()))
        return _confirmed(module, declared, best)
    if "weight" in module.tensors and len(module.tensors) == 1:
        stored = module.tensors["weight"]
        reason = f"is {stored.dtype} and has no scales beside it"
        raise stored.refused(reason, "download it again", "missing")
    names = ", ".join(sorted(module.tensors))
    shapes = " and ".join(f"{name} {list(each.shape)}" for name, each in sorted(module.tensors.items()))
    message = (
        f"{declared.where}: {module.name} has the tensors {names}, of no format that this version knows"
        f" ({shapes})"
    )
    raise Refused("unsupported", module.name, message=message, way_out="use the bf16 checkpoint")


def _confirmed(module: Module, declared: Declared, known: Format) -> LazyGroup:
    more = sorted(set(module.tensors) - known.tensors)
    if more:
        raise module.tensors[more[0]].refused(
            f"does not belong to {known.name}, which the other tensors of {module.name} are",
            code="unsupported",
        )
    if declared.method and declared.method not in known.methods:
        message = (
            f"{declared.where}: quant_method is {declared.method}, but the tensors of {module.name} are"
            f" {known.name}"
        )
        raise Refused("conflict", "quant_method", message=message, way_out="correct one of them")
    group = known.find(module, declared)
    if declared.names and group.layout.kind not in declared.kinds:
        message = (
            f"{declared.where}: weights are declared as {' and '.join(declared.names)}, but {module.name} is"
            f" {group.layout.kind}"
        )
        raise Refused("conflict", module.name, message=message, way_out="correct one of them")
    if declared.asymmetric and "zeros" not in group.layout.others:
        message = f"{declared.where}: symmetric is false, but {module.name} has no weight_zero_point"
        raise Refused("conflict", module.name, message=message, way_out="download it again")
    return group
