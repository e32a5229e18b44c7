"""Drafts by prompt lookup in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel

_look_up = Kernel("step.look_up", "_look_up")

BLOCK = 4096  # places of the text, compared at once


def look_up(plan: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, min_n: int, max_n: int) -> None:
    """spec.py"""
    _look_up[(len(plan) - 1,)](
        plan, lengths, ids, lengths.shape[1], ids.shape[1], min_n, max_n, BLOCK=BLOCK, num_warps=8
    )
