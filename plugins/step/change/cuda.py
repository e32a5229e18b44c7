"""Entries of the page table that changed, in one launch. A place other than 0 may come once."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv

_change = Kernel("step.change", "_change")

BLOCK = 256  # changes of a program


def change(changes: torch.Tensor, table: torch.Tensor) -> None:
    """spec.py"""
    num = len(changes)
    if num:
        _change[(cdiv(num, BLOCK),)](changes, table, num, BLOCK=BLOCK, num_warps=4)
