"""The truth: prompt lookup (after arXiv 2304.04487), one place of the text after the other."""

from itertools import pairwise

import torch

from hemiola.plugins.step.plan import DRAFTS, TOTAL, PlanFields


def look_up(
    plan: torch.Tensor,  # [N + 1, 10]
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    min_n: int,
    max_n: int,
) -> None:
    """Rows with room get as many drafts: the ids behind the latest earlier occurrence of the longest suffix
    of min_n to max_n ids of the text, or none if there is no such occurrence. One that overlaps the end of
    the text continues into the drafts, as a period would."""
    for row, _ in pairwise(PlanFields(*line) for line in plan.tolist()):
        if row.room == 0 or row.slot == 0:
            continue
        text = ids[row.slot, : lengths[TOTAL, row.slot]].tolist()
        last, best, longest = len(text) - 1, -1, min_n - 1
        for place in range(last - 1, -1, -1):
            num = 0
            while num < max_n and num <= place and text[place - num] == text[last - num]:
                num += 1
            if num > longest:
                best, longest = place, num
        lengths[DRAFTS, row.slot] = row.room if best >= 0 else 0
        for number in range(row.room if best >= 0 else 0):
            ids[row.slot, len(text) + number] = text[best + 1 + number % (last - best)]
