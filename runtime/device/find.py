"""The device that an engine was built for, or why it is not here."""

from itertools import permutations
from pathlib import Path

import torch

from hemiola.runtime.arch import ARCHS, VISIBLE, arch_here, rebuilt_for, split, visible
from hemiola.runtime.errors import Refused


def find_device(engine_dir: Path, arch: str, num_ranks: int = 1) -> torch.device:
    """The CPU, or the first GPU that CUDA_VISIBLE_DEVICES lets us see, which must be of the engine's kind; so
    must those behind it be, one for each rank."""
    names = split(arch)
    if unknown := [name for name in names if name not in ARCHS]:
        message = f"{engine_dir} was built for {unknown[0]}, known are {', '.join(ARCHS)}"
        raise Refused("unknown", message=message, way_out="run build-engine again")
    needed = [capability for name in names if (capability := ARCHS[name].capability)]
    if not needed:
        return torch.device("cpu")
    capabilities = " or ".join(map(_dotted, needed))
    built = f"{engine_dir} was built for {arch} (compute capability {capabilities})"
    if not torch.cuda.is_available():
        message = f"{built}, but torch finds no CUDA device here{visible()}"
        raise Refused("not_found", message=message, way_out=f"{rebuilt_for('cpu')}")
    capability_here = torch.cuda.get_device_capability(0)
    if capability_here in needed:
        if num_ranks > 1:
            _check_peers(engine_dir, num_ranks)
        return torch.device("cuda", 0)
    name = torch.cuda.get_device_name(0)
    message = f"{built}, but {name} has {_dotted(capability_here)}"
    raise Refused("unsupported", message=message, way_out=f"{rebuilt_for(arch_here())}")


def _check_peers(engine_dir: Path, num_ranks: int) -> None:
    """Ranks have equal GPUs, whose memory all of them reach."""
    num = torch.cuda.device_count()
    if num_ranks > num:
        built = f"{engine_dir} was built with --tp {num_ranks}, for as many GPUs"
        message = f"{built}, but torch finds {num} here{visible()}"
        raise Refused(
            "not_found",
            "tp",
            message=message,
            way_out="open it where there are more, or rebuild with a lower --tp",
        )
    first = _kind_of(0)
    for rank in range(1, num_ranks):
        if (other := _kind_of(rank)) != first:
            message = (
                f"{engine_dir} needs {num_ranks} equal GPUs, but GPU 0 is {first} and GPU {rank} is {other}"
            )
            raise Refused("unsupported", "tp", message=message, way_out=f"name equal ones in {VISIBLE}")
    for one, other in permutations(range(num_ranks), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            needs = f"{engine_dir} needs GPUs that reach each other's memory"
            message = f"{needs}, but GPU {one} cannot reach GPU {other}"
            raise Refused(
                "unsupported",
                "tp",
                message=message,
                way_out=f"name others in {VISIBLE}, or rebuild with --tp 1",
            )


def _kind_of(number: int) -> str:
    properties = torch.cuda.get_device_properties(number)
    return f"{properties.name} with {properties.total_memory / 2**30:.1f} GiB"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
