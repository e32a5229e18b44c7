"""What engines can be built for: the table of targets and architectures."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Literal, NamedTuple

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.builder.targets.torch import CompiledSegment, Job
from hemiola.runtime import arch as known
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install


class Target(NamedTuple):
    name: manifest.Target
    archs: tuple[str, ...]
    module: str  # of this package; its `compile` puts a segment into the engine directory
    promise: Literal["bits", "tokens"] = "bits"  # tokens: parts may round by the number of tokens beside one
    takes_codes: bool = False  # quantised weights

    @property
    def compile(self) -> Callable[[Graph, dict[str, Lazy], Job], CompiledSegment]:
        return import_module(f"hemiola.builder.targets.{self.module}").compile


RTX = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("torch", tuple(known.ARCHS), "torch", takes_codes=True),
        Target("onnxruntime", ("cpu",), "onnxruntime", "tokens"),
        Target("tensorrt", tuple(name for name in known.ARCHS if name != "cpu"), "trt.tensorrt", "tokens"),
        Target("tensorrt-rtx", RTX, "trt.rtx", "tokens", takes_codes=True),
    )
}


def pick(target: str, arch: str) -> tuple[Target, tuple[str, ...]]:
    """The target and the architectures that it compiles for, or the list of what exists."""
    if target not in TARGETS:
        message = f"--target {target} is not supported by this version, only {', '.join(TARGETS)}"
        raise Refused("unknown", "target", message=message, way_out="use one of these")
    chosen, archs = TARGETS[target], tuple(dict.fromkeys(known.split(arch)))
    if archs == ("cpu",) and "cpu" not in chosen.archs:
        number = "one" if target == "tensorrt" else "one or more"
        message = f"--target {target} is not for CPUs"
        way_out = f"give --arch, {number} of {', '.join(chosen.archs)}"
        raise Refused("conflict", "arch", message=message, way_out=way_out)
    for name in archs or [arch]:
        if name not in chosen.archs:
            meant = "".join(get_close_matches(name.lower(), chosen.archs, 1, cutoff=0.85))
            message = f"--arch {name} is not supported by --target {target}, only {', '.join(chosen.archs)}"
            way_out = f"{f'is it {meant}?' if meant else 'pass --arch with some of these'}"
            raise Refused("unsupported", "arch", message=message, way_out=way_out)
    if len({known.ARCHS[name].device for name in archs}) > 1:
        message = f"--arch {arch}: an engine for the CPU computes in other numbers than one for GPUs"
        raise Refused("conflict", "arch", message=message, way_out="build one for each")
    try:
        import_module(f"hemiola.builder.targets.{chosen.module}")
    except ModuleNotFoundError as error:
        where = " on the machine whose GPU the engine is for" if target == "tensorrt" else ""
        message = f"--target {target} needs {error.name}"
        raise Refused("not_found", "target", message=message, way_out=f"{install(target)}{where}") from None
    except ImportError as error:
        message = f"--target {target}: its compiler cannot be loaded ({error})"
        raise Refused("failed", message=message, way_out=f"{install(target)} again") from None
    return chosen, archs
