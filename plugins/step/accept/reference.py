"""The law of acceptance, greedy and sampled alike.

A choice is the argmax, or a draw whose noise is a function of the request's seed and the position
(runtime/choose/sampling.py). The trunk makes the choices that it would make without drafts, and a draft stays
where it equals the choice. So the output is the same, id for id, and a draft is kept with the probability
that the trunk gives it: rejection sampling of a point mass, with a common random number.
"""

import math
from itertools import pairwise

import torch

from hemiola.plugins.step.plan import ACCEPTED, BROKEN, COMMITTED, DRAFTS, EDGE, JUDGED, TOTAL, PlanFields


def accept(
    plan: torch.Tensor,  # [N + 1, 10]
    chosen: torch.Tensor,  # [L] int64
    logit: torch.Tensor,  # [L] of the token that was chosen; one that is not finite breaks the line
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    answers: torch.Tensor,  # [N, width + 4 or more] int64: choices of the row; accepted, judged, broken
    width: int,  # most lines of a row
    chunk_len: int,
) -> None:
    """Drafts that are the choices become text, and the next choice follows them. Columns of `answers` behind
    a row's own choices hold anything, and so do rows that choose nothing."""
    for n, (row, after) in enumerate(pairwise(PlanFields(*line) for line in plan.tolist())):
        if row.slot == 0:
            continue
        committed = int(lengths[COMMITTED, row.slot])
        final = committed + after.token - row.token - row.num_drafts
        lengths[COMMITTED, row.slot] = final
        lengths[EDGE, row.slot] = final - final % chunk_len
        if row.line == after.line:
            continue
        total = int(lengths[TOTAL, row.slot])
        drafts = ids[row.slot, total:].tolist()
        choices, logits = chosen[row.line : after.line].tolist(), logit[row.line : after.line].tolist()
        judged, accepted = min(row.num_drafts, int(lengths[DRAFTS, row.slot])), 0
        while accepted < judged and choices[accepted] == drafts[accepted] and math.isfinite(logits[accepted]):
            accepted += 1
        ids[row.slot, total + accepted] = choices[accepted]
        lengths[TOTAL, row.slot] = total + accepted + 1
        lengths[COMMITTED, row.slot] = total + accepted
        lengths[DRAFTS, row.slot] = 0
        answers[n, : len(choices)] = torch.tensor(choices)
        answers[n, width + ACCEPTED], answers[n, width + JUDGED] = accepted, judged
        answers[n, width + BROKEN] = not math.isfinite(logits[accepted])
