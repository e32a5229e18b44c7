"""What the host reads of a step, behind a fence."""

from array import array
from typing import NamedTuple

import torch

from hemiola.plugins.step.plan import ACCEPTED, ANSWERS, BROKEN, JUDGED, PROPOSED
from hemiola.runtime.api import Logprob
from hemiola.runtime.engine.sampling import to_logprobs
from hemiola.runtime.engine.step import Outcome, Plan
from hemiola.runtime.step.program import MARKS

Logprobs = dict[int, tuple[torch.Tensor, ...]]  # by row of the plan that asked: what sampling.logprobs made


class StepOutput(NamedTuple):
    """Times of the device, and answers of each row [N, width + 4 + told_drafts], flat int64."""

    plan: Plan
    numbers: "torch.Tensor | array[int]"
    width: int
    told_drafts: int
    logprobs: Logprobs

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
            self._read_logprobs(outcome, n, parts)
        return outcome

    def _read_logprobs(self, outcome: Outcome, n: int, parts: tuple[torch.Tensor, ...]) -> None:
        """What fails here costs the row its request, and no other."""
        kept = outcome.token_ids[n]
        try:
            found: list[Logprob] = to_logprobs(kept, *(part[: len(kept)] for part in parts))
            outcome.logprobs[n] = found
        except Exception as error:
            outcome.faults[n] = f"logprobs: {type(error).__name__}: {error}"
