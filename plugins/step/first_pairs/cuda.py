"""What a drafting head reads first, in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_first_pairs = Kernel("step.first_pairs", "_first_pairs")

PAIRS, CHANNELS, ROWS = 4, 512, 64  # of a program


def first_pairs(
    plan: torch.Tensor,
    rows: torch.Tensor,
    hidden: torch.Tensor,
    ring: torch.Tensor,
    lengths: torch.Tensor,
    ids: torch.Tensor,
    num_pairs: int,
    num_drafting: int,
) -> tuple[torch.Tensor, ...]:
    """spec.py"""
    num_rows, (_, ring_len, width) = len(rows), ring.shape

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=plan.device)

    head_rows, before = made(num_rows, 8), made(num_pairs, width, dtype=hidden.dtype)
    token_ids, positions, wanted = made(num_pairs), made(num_pairs), made(num_drafting)
    draft_slot = made(num_drafting, dtype=torch.int64)
    block = min(CHANNELS, pow2(width))
    blocks_of_pairs = cdiv(num_pairs, PAIRS)
    _first_pairs[blocks_of_pairs + cdiv(max(num_rows, num_drafting), ROWS), cdiv(width, block)](
        plan, rows, hidden, ring, lengths, ids, head_rows, token_ids, before, positions, wanted, draft_slot,
        num_rows, num_pairs, num_drafting, lengths.shape[1], ids.shape[1], ring_len, width,
        PAIRS=PAIRS, CHANNELS=block, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return head_rows, token_ids, before, positions, wanted, draft_slot
