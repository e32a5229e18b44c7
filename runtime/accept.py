"""What the logits of a step mean: each row's next tokens. Acceptance of drafts (issue 3) goes here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hemiola.runtime.request import Logprob
from hemiola.runtime.sampling import Draw, logprob, sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """By row of the step: tokens to append (none while a prompt is under way)."""

    token_ids: list[list[int]]
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # of rows that asked
    errors: dict[int, str] = field(default_factory=dict)  # of rows that cannot go on


def judge(draws: Sequence[Draw | None], logits: torch.Tensor) -> Verdict:
    """One token for every row that draws. logits [L, V] fp32 are those of the drawing rows, in order."""
    verdict = Verdict([[] for _ in draws])
    rows = [row for row, draw in enumerate(draws) if draw is not None]
    scores = logits.detach().cpu().numpy()
    best = scores.argmax(axis=-1)  # lowest id of equals; the first NaN where there is one
    broken = np.isnan(scores[np.arange(len(scores)), best]).tolist()
    for row, token_id, is_broken, at in zip(rows, best.tolist(), broken, range(len(rows)), strict=False):
        draw = draws[row]
        assert draw is not None
        if is_broken:
            verdict.errors[row] = f"the engine computed NaN for the token at position {draw.position}"
            continue
        if draw.params.temperature > 0:
            token_id = sample(scores[at], draw)
        verdict.token_ids[row].append(token_id)
        if draw.params.logprobs is not None:
            verdict.logprobs[row] = [logprob(scores[at], token_id, draw.params.logprobs)]
    return verdict
