"""A step's inputs in one launch."""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv

_fill = Kernel("step.fill", "_fill")

ITEMS, PAGES = 32, 256  # of a program, and of a pass of its loop


def fill(
    plan: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    ids: torch.Tensor,
    num_tokens: int,
    num_lines: int,
) -> tuple[torch.Tensor, ...]:
    """spec.py"""
    num_rows, (num_slots, table_len) = len(plan) - 1, table.shape

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=plan.device)

    rows, pages = made(num_rows, 8), made(num_rows, table_len)
    token_ids, positions, line_token = made(num_tokens), made(num_tokens), made(num_lines)
    line_slot, line_position = (made(num_lines, dtype=torch.int64) for _ in range(2))
    _fill[(num_rows + cdiv(num_tokens, ITEMS) + cdiv(num_lines, ITEMS),)](
        plan, table, lengths, ids, rows, pages, token_ids, positions, line_token, line_slot, line_position,
        num_rows, num_tokens, num_lines, num_slots, table_len, ids.shape[1], ITEMS=ITEMS, PAGES=PAGES,
        num_warps=4,
    )  # fmt: skip
    return rows, pages, token_ids, positions, line_token, line_slot, line_position
