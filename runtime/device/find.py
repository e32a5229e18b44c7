"""The device that an engine was built for, or why it is not here."""

from pathlib import Path

import torch

from hemiola.runtime.arch import ARCHS, arch_here, rebuilt_for, split, visible
from hemiola.runtime.errors import Refused


def find_device(engine_dir: Path, arch: str) -> torch.device:
    """The CPU, or the first GPU that CUDA_VISIBLE_DEVICES lets us see, which must be of the engine's kind."""
    names = split(arch)
    if unknown := [name for name in names if name not in ARCHS]:
        said = f"{engine_dir} was built for {unknown[0]}, known are {', '.join(ARCHS)}"
        raise Refused("unknown", said=said, way_out="run build-engine again")
    needed = [capability for name in names if (capability := ARCHS[name].capability)]
    if not needed:
        return torch.device("cpu")
    capabilities = " or ".join(map(_dotted, needed))
    built = f"{engine_dir} was built for {arch} (compute capability {capabilities})"
    if not torch.cuda.is_available():
        said = f"{built}, but torch finds no CUDA device here{visible()}"
        raise Refused("not_found", said=said, way_out=f"{rebuilt_for('cpu')}")
    found = torch.cuda.get_device_capability(0)
    if found in needed:
        return torch.device("cuda", 0)
    name = torch.cuda.get_device_name(0)
    said = f"{built}, but {name} has {_dotted(found)}"
    raise Refused("unsupported", said=said, way_out=f"{rebuilt_for(arch_here())}")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
