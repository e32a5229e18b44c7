"""Where a served engine runs: which GPU, and what Triton's instance groups may ask for."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hemiola.runtime.arch import ARCHS, VISIBLE, rebuilt_for, split, visible
from hemiola.runtime.engine_files import check_regular
from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import parse_json, read_text
from hemiola.runtime.options import TP_SIZES, ServeConfig
from hemiola.runtime.outline import FILE, MOST_BYTES

# Of our config.pbtxt: the engine finds its device.
ANYWHERE = "instance_group [ { kind: KIND_MODEL count: 1 } ]"
FRACTION: float = ServeConfig.model_fields["memory_fraction"].default


def is_for_gpu(arch: str) -> bool:
    """One that is unknown is refused where the engine is opened."""
    known = ARCHS.get(split(arch)[0])
    return known is not None and known.device == "cuda"


def choose_gpu(engine_dir: Path, arch: str, device: int | None, num_ranks: int = 1) -> int | None:
    """Before a server starts: the number of the engine's GPU, or of the first of several, among those that
    there are; None is the CPU."""
    if not is_for_gpu(arch):
        if device is not None:
            limit = f"but {engine_dir} was built for {arch}"
            raise Refused("conflict", "device", device, limit, "leave it out")
        return None
    import torch  # takes seconds; a server without GPUs does without

    num_gpus, number = torch.cuda.device_count(), device or 0
    if number + num_ranks <= num_gpus:
        return number
    last = number + num_ranks - 1
    where = f"GPU {number}" if num_ranks == 1 else f"GPUs {number} to {last} (--tp {num_ranks})"
    message = (
        f"{engine_dir} was built for {arch} and is to run on {where}, but {num_gpus} GPUs are visible"
        f" here{visible()}"
    )
    lower = "choose a lower device" if num_ranks <= num_gpus else "rebuild with a lower --tp"
    way_out = f"{lower if num_gpus else rebuilt_for('cpu')}"
    raise Refused("not_found", "device", message=message, way_out=way_out)


def share_memory(models: Collection[dict[str, Any]], num_ranks: Sequence[int] = ()) -> None:
    """Engines open at the same time: each would take its part of what the others take meanwhile, too.
    num_ranks: of each engine, where some have several."""
    places = [
        {None if settings["device"] is None else settings["device"] + n for n in range(num)}
        for settings, num in zip(models, num_ranks or [1] * len(models), strict=True)
    ]
    together = Counter(place for devices in places for place in devices)
    for settings, devices in zip(models, places, strict=True):
        settings.setdefault("memory_fraction", FRACTION / max(together[place] for place in devices))


def group_of(device: object) -> str:
    """As config.pbtxt has it."""
    return f"instance_group [ {{ kind: KIND_GPU count: 1 gpus: [ {device} ] }} ]"


def check_instances(groups: Sequence[Mapping[str, Any]]) -> None:
    """Triton spreads requests over instances; what is cached or cancelled in one is unknown to the others."""
    num = sum(group["count"] * max(1, len(group["gpus"])) for group in groups)
    if num != 1:
        message = f"instance_group asks for {num} instances, and an engine has one"
        way_out = (
            "write count: 1 and a single number in gpus, and give every further GPU a model or a server of"
            " its own (docs/scaling.md)"
        )
        raise Refused("unsupported", message=message, way_out=way_out)


def ranks_of(engine_dir: str) -> int:
    """How many GPUs an engine takes; one that is no engine is refused when it is opened."""
    num_ranks: object = 1
    with suppress(OSError, ValueError, AttributeError, Refused):
        check_regular(Path(engine_dir) / FILE)
        num_ranks = parse_json(read_text(Path(engine_dir) / FILE, "", MOST_BYTES)).get("tp")
    return next((size for size in TP_SIZES if size == num_ranks), 1)


def take_place(kind: str, number: int, device: int | None, num_ranks: int = 1) -> None:
    """In an engine's process, before CUDA is called: of the server's GPUs, it sees its own and no other; as
    many as it has ranks, from this one on."""
    if device is not None and (kind != "GPU" or device != number):
        limit = f"but Triton's instance is KIND_{kind} {number}"
        way_out = f"leave device out, and write {group_of(device)} into config.pbtxt"
        raise Refused("conflict", "device", device, limit, way_out)
    if kind == "GPU":
        named = os.environ.get(VISIBLE)
        names = named.split(",") if named is not None else [str(n) for n in range(number + num_ranks)]
        os.environ[VISIBLE] = ",".join(name.strip() for name in names[number : number + num_ranks])


def check_place(engine_dir: str, arch: str, kind: str, num_ranks: int = 1) -> None:
    """Of an open engine."""
    if kind != "MODEL" and is_for_gpu(arch) != (kind == "GPU"):
        right = "KIND_GPU" if is_for_gpu(arch) else "KIND_MODEL"
        message = f"{engine_dir} was built for {arch}, but its instance_group is KIND_{kind}"
        raise Refused("conflict", message=message, way_out=f"write {right}")
    if kind == "GPU" and _num_gpus() != num_ranks:
        message = f"CUDA was called before {VISIBLE} could name the engine's GPU"
        raise Refused("failed", message=message, way_out="write KIND_MODEL")


def _num_gpus() -> int:
    """That CUDA shows to this process, which has called it."""
    import torch

    return torch._C._cuda_getDeviceCount()
