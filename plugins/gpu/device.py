"""What tile tables need to know of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A GPU's compute capability (90: Hopper) and its multiprocessors."""

    capability: int
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return SHARED[self.capability]


# CUDA programming guide, technical specifications per compute capability
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}
H200 = Gpu(90, 132)
_built_for = H200


@contextmanager
def built_for(gpu: Gpu) -> Iterator[None]:
    """Inside, tensors without memory pass for tensors of this GPU."""
    global _built_for
    before, _built_for = _built_for, gpu
    try:
        yield
    finally:
        _built_for = before


def gpu_of(device: torch.device) -> Gpu:
    """A CPU, under Triton's interpreter, passes for an H200."""
    if device.type == "meta":
        return _built_for
    return _gpu_of(device) if device.type == "cuda" else H200


@lru_cache
def _gpu_of(device: torch.device) -> Gpu:
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)
