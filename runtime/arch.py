"""What an engine is built for: the device and the numbers that it computes with. One table."""

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a server knows these names before anything needs torch
    import torch


class Arch(NamedTuple):
    device: str  # cpu | cuda
    dtype: str  # of activations, weights, records, pages, if none is asked for; states: fp32
    capability: tuple[int, int] | None = None  # of the GPU


def name_of(dtype: "torch.dtype") -> str:
    """As files spell it, and `getattr(torch, ...)` finds it."""
    return str(dtype).removeprefix("torch.")


VISIBLE = "CUDA_VISIBLE_DEVICES"
NAMES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
ARCHS = {"cpu": Arch("cpu", "float32")}
ARCHS |= {name: Arch("cuda", "bfloat16", (int(name[3:-1]), int(name[-1]))) for name in NAMES}


def arch_here() -> str:
    """What an engine for this machine is built for: its first GPU, or the CPU."""
    import torch

    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    return next((arch for arch, known in ARCHS.items() if known.capability == capability), "cpu")


def visible_from(first: int) -> str:
    """The GPUs that this process sees, that one first: what a process sees whose own it is."""
    import torch

    named = os.environ.get(VISIBLE)
    names = named.split(",") if named is not None else [str(n) for n in range(torch.cuda.device_count())]
    return ",".join(name.strip() for name in names[first:] + names[:first])


def visible() -> str:
    """What hides GPUs, if something does, behind a refusal."""
    named = os.environ.get(VISIBLE)
    return "" if named is None else f" ({VISIBLE} is {named!r})"


def rebuilt_for(arch: str) -> str:
    """The way out for an engine that cannot run here. In its own folder another would replace it."""
    return (
        "open it on a machine with such a GPU, or run build-engine CHECKPOINT --engine-dir ANOTHER"
        f" --arch {arch}"
    )


def split(names: str) -> list[str]:
    """The architectures of an engine, which share a device and the numbers that it computes with."""
    return names.replace(",", " ").split()
