"""What a drafting head will read later, in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_keep = Kernel("step.keep", "_keep")

TOKENS, CHANNELS = 4, 512  # copied at once


def keep(rows: torch.Tensor, lengths: torch.Tensor, hidden: torch.Tensor, ring: torch.Tensor) -> None:
    """spec.py"""
    _, ring_len, width = ring.shape
    block = min(CHANNELS, pow2(width))
    _keep[len(rows), cdiv(width, block)](
        rows, lengths, hidden, ring, lengths.shape[1], ring_len, width, TOKENS=TOKENS, CHANNELS=block,
        num_warps=4,
    )  # fmt: skip
