"""What the host reads of a step, behind a fence."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hemiola.plugins.step.plan import ANSWERS
from hemiola.runtime.api import Logprob
from hemiola.runtime.choose.sampling import to_logprobs
from hemiola.runtime.schedule.plan import Outcome, Plan
from hemiola.runtime.step.program import MARKS

Logprobs = dict[int, tuple[torch.Tensor, ...]]  # by row of the plan that asked: what sampling.logprobs made


class StepOutput(NamedTuple):
    """Times of the device, and answers of each row [N, width + 4 + told_drafts], flat int64."""

    plan: Plan
    numbers: "torch.Tensor | array[int]"
    width: int
    told_drafts: int
    logprobs: Logprobs
    of_prompts: tuple[torch.Tensor, ...] = ()  # the same of scored tokens, row after row

    def seconds(self) -> tuple[float, float, float]:
        """From each mark to the next."""
        begin, computed, chosen, end = self.numbers[:MARKS].tolist()
        return (computed - begin) / 1e9, (chosen - computed) / 1e9, (end - chosen) / 1e9

    def read(self) -> Outcome:
        """By row of the plan, for the rows that chose."""
        numbers, width, end = self.numbers.tolist(), self.width, MARKS
        outcome = Outcome({}, {}, {}, set(), {})
        token_ids, num_judged, num_drafts = outcome.token_ids, outcome.num_judged, outcome.num_drafts
        for n, row in enumerate(self.plan.rows):
            start, counts = end, end + width
            drafts = counts + ANSWERS
            end = drafts + self.told_drafts
            if not row.chooses:
                continue
            accepted, num_judged[n], broken, num_drafts[n] = numbers[counts:drafts]
            token_ids[n] = numbers[start : start + accepted + 1 - broken]
            if broken:
                outcome.broken.add(n)
            if row.request.guide is not None:
                outcome.drafts[n] = numbers[drafts:end]
        for n, parts in self.logprobs.items():
            kept = outcome.token_ids[n]
            logprobs = [part[: len(kept)] for part in parts]
            _read_logprobs(outcome, outcome.logprobs, n, kept, logprobs)
        if self.of_prompts:
            self._read_prompts(outcome)
        return outcome

    def _read_prompts(self, outcome: Outcome) -> None:
        end = 0
        for n, row in enumerate(self.plan.rows):
            if (scored := row.scored) is not None:
                start, end = end, end + len(scored.token_ids)
                chosen, top_ids, top = (part[start:end] for part in self.of_prompts)
                logprobs = [chosen, top_ids[:, : scored.num_top], top[:, : scored.num_top]]
                _read_logprobs(outcome, outcome.prompt_logprobs, n, scored.token_ids.tolist(), logprobs)


def _read_logprobs(
    outcome: Outcome,
    by_row: dict[int, list[Logprob]],
    n: int,
    token_ids: list[int],
    parts: Sequence[torch.Tensor],
) -> None:
    """What fails here costs the row its request, and no other."""
    try:
        by_row[n] = to_logprobs(token_ids, *parts)
    except Exception as error:
        outcome.faults[n] = f"logprobs: {type(error).__name__}: {error}"
