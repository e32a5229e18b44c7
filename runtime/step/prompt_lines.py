"""Log-probabilities of tokens of prompts: a step's chooser that also reads hidden states of all tokens.

A prompt's own lines would take as much memory as it has tokens times the vocabulary. So they go through the
output head a few at a time, and only their log-probabilities are kept.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hemiola.runtime.abi import widths
from hemiola.runtime.choose.sampling import logprobs
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.program import Batch, Chooser

AT_ONCE = 64  # lines


def most_lines(config: Resolved) -> int:
    """That go through the head together: it has kernels for as many as a step may choose with."""
    return min(AT_ONCE, widths(config, "trunk")["L"])


class WithPrompts:
    """A chooser of a plan whose prompts are scored, too."""

    def __init__(
        self, ops: SimpleNamespace, choice: Chooser, plan: Plan, device: torch.device, at_once: int
    ) -> None:
        self._ops, self._choice, self._at_once = ops, choice, at_once
        places, token_ids, end = [], [], 0
        for row in plan.rows:
            start, end = end, end + row.num_tokens
            if (scored := row.scored) is not None:
                places.append(np.arange(start, start + len(scored.token_ids)) + scored.first)
                token_ids.append(scored.token_ids.astype(np.int64))
        self._num_top = max(row.scored.num_top for row in plan.rows if row.scored is not None)
        self._places, self._token_ids = upload(device, np.concatenate(places), np.concatenate(token_ids))
        self.logprobs: tuple[torch.Tensor, ...] = ()  # of the scored tokens [M], row after row

    def scores(self, out: Computed) -> Any:
        parts = [
            logprobs(out.logits_of(out.hidden[places]), token_ids, self._num_top, self._ops)
            for places, token_ids in zip(
                self._places.split(self._at_once), self._token_ids.split(self._at_once), strict=True
            )
        ]
        self.logprobs = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        return self._choice.scores(out)

    def choose(self, scores: Any, batch: Batch) -> Best:
        return self._choice.choose(scores, batch)

    def draft(self, out: Computed, slot: Any, number: int) -> Any:
        return self._choice.draft(out, slot, number)
