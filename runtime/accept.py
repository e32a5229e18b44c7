"""What the logits of a step mean: which drafts stay, and each row's next token.

The law of acceptance, greedy and sampled alike: a choice is the argmax, or a draw whose noise is a function
of the request's seed and the position (sampling.py). The trunk makes the choices that it would make without
drafts, and a draft stays where it equals the choice. So the output is the same, id for id, and a draft is
kept with the probability that the trunk gives it: rejection sampling of a point mass, with a common random
number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hemiola.runtime.request import Logprob
from hemiola.runtime.sampling import Draw, choose, logprob


@dataclass(frozen=True, slots=True)
class Verdict:
    """By row of the step: tokens to append (none while a prompt is under way)."""

    token_ids: list[list[int]]
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # of rows that asked
    errors: dict[int, str] = field(default_factory=dict)  # of rows that cannot go on


def judge(draws: Sequence[Draw | None], logits: torch.Tensor) -> Verdict:
    """Tokens for every row that draws. logits [L, V] fp32: by row, one per draft and one behind them."""
    verdict = Verdict([[] for _ in draws])
    scores = logits.detach().cpu().numpy()
    best = scores.argmax(axis=-1)  # lowest id of equals; the first NaN where there is one
    broken = np.isnan(scores[np.arange(len(scores)), best])
    first = 0
    for row, draw in enumerate(draws):
        if draw is None:
            continue
        own = slice(first, first + len(draw.drafts) + 1)
        first = own.stop
        if broken[own].any():
            verdict.errors[row] = f"the engine computed NaN for the token at position {draw.position}"
            continue
        verdict.token_ids[row] = token_ids = _accept(draw, scores[own], best[own])
        if draw.params.logprobs is not None:
            verdict.logprobs[row] = [
                logprob(line, token_id, draw.params.logprobs)
                for line, token_id in zip(scores[own], token_ids, strict=False)
            ]
    return verdict


def _accept(draw: Draw, scores: np.ndarray, best: np.ndarray) -> list[int]:
    """The drafts that the trunk chooses too, then its next choice."""
    token_ids: list[int] = []
    for at in range(len(draw.drafts) + 1):
        if draw.params.temperature == 0:
            token_ids.append(int(best[at]))
        else:
            token_ids.append(choose(scores[at], draw._replace(position=draw.position + at)))
        if at < len(draw.drafts) and token_ids[at] != draw.drafts[at]:
            break
    return token_ids
