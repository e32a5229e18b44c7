"""What engines can be built for: the table of targets and architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hemiola.builder.checkpoint import Lazy
from hemiola.builder.graph import Graph
from hemiola.builder.targets import torch as torch_target
from hemiola.builder.targets.torch import Compiled
from hemiola.runtime.errors import Refused


class Target(NamedTuple):
    archs: tuple[str, ...]
    # one segment into the engine directory, for cpu or cuda
    compile: Callable[[Graph, dict[str, Lazy], Path, str], Compiled]


TARGETS = {"torch": Target(torch_target.ARCHS, torch_target.compile)}


def pick(target: str, arch: str) -> Target:
    """The target that compiles for `arch`, or the list of what exists."""
    if target not in TARGETS:
        raise Refused(
            f"--target {target} is not supported by this version, only {', '.join(TARGETS)}; use one of these"
        )
    archs = TARGETS[target].archs
    if len(arch.replace(",", " ").split()) > 1:
        raise Refused(f"--arch {arch}: an engine is for one architecture; build one for each")
    if arch not in archs:
        raise Refused(
            f"--arch {arch} is not supported by --target {target}, only {', '.join(archs)}; use one of these"
        )
    return TARGETS[target]
