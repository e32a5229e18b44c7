"""The truth: one row after the other."""

from itertools import pairwise

import torch

from hemiola.plugins.step.plan import TOTAL, PlanFields


def next_pairs(
    plan: torch.Tensor,  # [N + 1, 10]
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    number: int,  # of the draft to come; the one before is in the ledger
    num_drafting: int,
) -> tuple[torch.Tensor, ...]:
    """The head's rows [N, 8], one pair for each that drafts: ids and positions of the pairs [D]. A row
    without room for one more draft is padding, and its pair nobody's."""
    head_rows = torch.zeros(len(plan) - 1, 8, dtype=torch.int32)
    token_ids, positions = torch.zeros(2, num_drafting, dtype=torch.int32)
    for n, (row, after) in enumerate(pairwise(PlanFields(*line) for line in plan.tolist())):
        head_rows[n, 0], head_rows[n, 1] = row.draft, after.draft - row.draft
        if row.draft < after.draft and row.room > number:
            place = int(lengths[TOTAL, row.slot]) + number - 1
            head_rows[n, 3], head_rows[n, 4] = row.slot, place
            token_ids[row.draft], positions[row.draft] = ids[row.slot, place], place
    return head_rows, token_ids, positions
