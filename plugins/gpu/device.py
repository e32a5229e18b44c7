"""What tile tables need to know of a GPU."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A GPU's compute capability (90: Hopper) and its multiprocessors."""

    capability: int
    multiprocessors: int


H200 = Gpu(90, 132)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """A CPU, under Triton's interpreter, passes for an H200."""
    if device.type != "cuda":
        return H200
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)
