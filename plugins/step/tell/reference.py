"""The truth: one row after the other."""

from itertools import pairwise

import torch

from hemiola.plugins.step.plan import ANSWERS, DRAFTS, PROPOSED, TOTAL, PlanFields


def tell(
    plan: torch.Tensor,  # [N + 1, 10]
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    answers: torch.Tensor,  # [N, width + 4 + most, or more] int64
    width: int,
    most: int,
) -> None:
    """How many drafts there are for the next step, of rows that have chosen; and the first `most` ids behind
    the text."""
    for n, (row, after) in enumerate(pairwise(PlanFields(*line) for line in plan.tolist())):
        if row.line < after.line:
            total = int(lengths[TOTAL, row.slot])
            answers[n, width + PROPOSED] = lengths[DRAFTS, row.slot]
            answers[n, width + ANSWERS : width + ANSWERS + most] = ids[row.slot, total : total + most]
