"""How launchers call kernels: no Triton here, so that an engine runs without a compiler."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

CLEAR_TOKENS = 16  # tokens whose row one program looks for


def pow2(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def cdiv(size: int, part: int) -> int:
    """How many parts cover the size."""
    return -(-size // part)


class Block(NamedTuple):
    """A tensor that a kernel reads or writes in boxes, through a descriptor (TMA)."""

    tensor: torch.Tensor
    box: Sequence[int]


class Kernel:
    """An entry point of `plugins/<op>/triton.py`, called as `kernel[grid](*arguments, CONSTANT=...)`."""

    def __init__(self, op: str, name: str) -> None:
        self.op, self.name = op, name

    def __repr__(self) -> str:
        return f"{self.op}{self.name}"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        jit = import_module("hemiola.plugins.gpu.jit")
        return lambda *arguments, **constants: jit.launch(self, grid, arguments, constants)
