"""A draft of each row, in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv

_write = Kernel("step.write", "_write")

ROWS = 64  # of a program


def write(
    plan: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, number: int
) -> None:
    """spec.py"""
    num_rows = len(plan) - 1
    _write[(cdiv(num_rows, ROWS),)](
        plan, chosen, lengths, ids, num_rows, lengths.shape[1], ids.shape[1], number, ROWS=ROWS, num_warps=2
    )
