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


CAPABILITIES = {"80": (8, 0), "86": (8, 6), "89": (8, 9), "90": (9, 0), "100": (10, 0), "120": (12, 0), "121": (12, 1)}
ARCHS = {"cpu": Arch("cpu", torch.float32)}
ARCHS |= {f"sm_{name}": Arch("cuda", torch.bfloat16, found) for name, found in CAPABILITIES.items()}
