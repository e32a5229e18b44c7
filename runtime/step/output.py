"""What the host reads of a step, behind a fence."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hemiola.plugins.step.plan import ACCEPTED, ANSWERS, BROKEN, JUDGED, PROPOSED
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

    def seconds(self, mark: int) -> float:
        """From this mark to the next."""
        start, end = self.numbers[mark : mark + 2].tolist()
        return (end - start) / 1e9

    def read(self) -> Outcome:
        """By row of the plan, for the rows that chose."""
        numbers, width, line = self.numbers.tolist(), self.width, self.width + ANSWERS + self.told_drafts
        outcome = Outcome({}, {}, {}, set(), {})
        for n, row in enumerate(self.plan.rows):
            if not row.chooses:
                continue
            own = numbers[MARKS + n * line : MARKS + (n + 1) * line]
            broken = own[width + BROKEN]
            outcome.token_ids[n] = own[: own[width + ACCEPTED] + 1 - broken]
            outcome.num_judged[n], outcome.num_drafts[n] = own[width + JUDGED], own[width + PROPOSED]
            if broken:
                outcome.broken.add(n)
            if row.request.guide is not None:
                outcome.drafts[n] = own[width + ANSWERS :]
        for n, parts in self.logprobs.items():
            kept = outcome.token_ids[n]
            own = [part[: len(kept)] for part in parts]
            _read_logprobs(outcome, outcome.logprobs, n, kept, own)
        self._read_prompts(outcome)
        return outcome

    def _read_prompts(self, outcome: Outcome) -> None:
        end = 0
        for n, row in enumerate(self.plan.rows):
            if (scored := row.scored) is not None:
                start, end = end, end + len(scored.token_ids)
                chosen, top_ids, top = (part[start:end] for part in self.of_prompts)
                own = [chosen, top_ids[:, : scored.num_top], top[:, : scored.num_top]]
                _read_logprobs(outcome, outcome.prompt_logprobs, n, scored.token_ids.tolist(), own)


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
