"""The truth: one row after the other."""

from itertools import pairwise

import torch

from hemiola.plugins.step.plan import TOTAL, PlanFields


def write(
    plan: torch.Tensor,  # [N + 1, 10]
    chosen: torch.Tensor,  # [D] int64, of the rows that draft
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    number: int,  # of the draft, from 0 on
) -> None:
    """The choice becomes a draft behind the text, if the row has room for so many."""
    for row, after in pairwise(PlanFields(*line) for line in plan.tolist()):
        if row.draft < after.draft and row.room > number:
            ids[row.slot, lengths[TOTAL, row.slot] + number] = chosen[row.draft]
