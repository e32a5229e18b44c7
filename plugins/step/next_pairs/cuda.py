"""What a drafting head reads to bring one more draft, in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv

_next_pairs = Kernel("step.next_pairs", "_next_pairs")

ROWS = 64  # of a program


def next_pairs(
    plan: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, number: int, num_drafting: int
) -> tuple[torch.Tensor, ...]:
    """spec.py"""
    num_rows = len(plan) - 1
    head_rows = torch.empty(num_rows, 8, dtype=torch.int32, device=plan.device)
    token_ids, positions = (
        torch.empty(num_drafting, dtype=torch.int32, device=plan.device) for _ in range(2)
    )
    _next_pairs[(cdiv(max(num_rows, num_drafting), ROWS),)](
        plan, lengths, ids, head_rows, token_ids, positions, num_rows, num_drafting, lengths.shape[1],
        ids.shape[1], number, ROWS=ROWS, num_warps=2,
    )  # fmt: skip
    return head_rows, token_ids, positions
