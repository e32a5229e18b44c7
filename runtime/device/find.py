"""The device that an engine was built for, or why it is not here."""

from pathlib import Path

import torch

from hemiola.runtime.arch import ARCHS, arch_here
from hemiola.runtime.errors import Refused


def find_device(engine_dir: Path, arch: str) -> torch.device:
    """The CPU, or the first GPU that CUDA_VISIBLE_DEVICES lets us see, which must be of the engine's kind."""
    if arch not in ARCHS:
        raise Refused(
            f"{engine_dir} was built for {arch}, known are {', '.join(ARCHS)}; run build-engine again"
        )
    needed = ARCHS[arch].capability
    if needed is None:
        return torch.device("cpu")
    built = f"{engine_dir} was built for {arch} (compute capability {_dotted(needed)})"
    if not torch.cuda.is_available():
        raise Refused(f"{built}, but torch finds no CUDA device here; {_rebuild(engine_dir, 'cpu')}")
    found = torch.cuda.get_device_capability(0)
    if found == needed:
        return torch.device("cuda", 0)
    name = torch.cuda.get_device_name(0)
    raise Refused(f"{built}, but {name} has {_dotted(found)}; {_rebuild(engine_dir, arch_here())}")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _rebuild(engine_dir: Path, arch: str) -> str:
    return f"run build-engine CHECKPOINT --engine-dir {engine_dir} --arch {arch}"
