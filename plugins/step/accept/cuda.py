"""Which drafts stay, in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, pow2

_accept = Kernel("step.accept", "_accept")


def accept(
    plan: torch.Tensor,
    chosen: torch.Tensor,
    logit: torch.Tensor,
    lengths: torch.Tensor,
    ids: torch.Tensor,
    answers: torch.Tensor,
    width: int,
    chunk_len: int,
) -> None:
    """spec.py"""
    _accept[(len(plan) - 1,)](
        plan, chosen, logit, lengths, ids, answers, lengths.shape[1], ids.shape[1], answers.stride(0), width,
        chunk_len, BLOCK=pow2(width), num_warps=1,
    )  # fmt: skip
