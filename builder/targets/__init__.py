"""What engines can be built for: the table of targets and architectures."""

from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple

from hemiola.builder.checkpoint import Lazy
from hemiola.builder.graph import Graph
from hemiola.builder.targets.torch import Compiled, Job
from hemiola.runtime import arch as known
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused


class Target(NamedTuple):
    name: manifest.Target
    archs: tuple[str, ...]
    module: str  # of this package; its `compile` puts a segment into the engine directory
    promise: Literal["bits", "tokens"] = "bits"  # tokens: parts may round by the number of tokens beside one
    is_portable: bool = False  # one engine for several architectures

    @property
    def compile(self) -> Callable[[Graph, dict[str, Lazy], Job], Compiled]:
        return import_module(f"hemiola.builder.targets.{self.module}").compile


RTX = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("torch", tuple(known.ARCHS), "torch"),
        Target("onnxruntime", ("cpu",), "onnxruntime", "tokens"),
        Target("tensorrt-rtx", RTX, "rtx", "tokens", is_portable=True),
    )
}


def pick(target: str, arch: str) -> tuple[Target, tuple[str, ...]]:
    """The target and the architectures that it compiles for, or the list of what exists."""
    if target not in TARGETS:
        raise Refused(
            f"--target {target} is not supported by this version, only {', '.join(TARGETS)}; use one of these"
        )
    found, archs = TARGETS[target], tuple(dict.fromkeys(known.split(arch)))
    if len(archs) > 1 and not found.is_portable:
        raise Refused(f"--arch {arch}: an engine is for one architecture; build one for each")
    for name in archs or [arch]:
        if name not in found.archs:
            raise Refused(
                f"--arch {name} is not supported by --target {target}, only {', '.join(found.archs)};"
                " use one of these"
            )
    try:
        import_module(f"hemiola.builder.targets.{found.module}")
    except ModuleNotFoundError as error:
        raise Refused(f"--target {target} needs {error.name}; pip install 'hemiola[{target}]'") from None
    return found, archs
