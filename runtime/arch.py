"""What an engine is built for: the device and the numbers that it computes with. One table."""

from typing import NamedTuple

import torch


class Arch(NamedTuple):
    device: str  # cpu | cuda
    dtype: torch.dtype  # of activations, weights, records and pages; states and sums are fp32
    capability: tuple[int, int] | None = None  # of the GPU

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


NAMES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
ARCHS = {"cpu": Arch("cpu", torch.float32)}
ARCHS |= {name: Arch("cuda", torch.bfloat16, (int(name[3:-1]), int(name[-1]))) for name in NAMES}
