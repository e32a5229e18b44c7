"""Drafters for tests, right, wrong, random or scripted: no output may depend on what they propose."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kit.demands import here

from hemiola.plugins.step.plan import ANSWERS, DRAFTS, PROPOSED, TOTAL
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.bucket import Bucket
from hemiola.runtime.step.captured import Captured, CapturedResult
from hemiola.runtime.step.ledger import Ledger
from hemiola.runtime.step.output import StepOutput
from hemiola.runtime.step.pack import PackedPlan, Ready
from hemiola.runtime.step.program import MARKS, Feed
from hemiola.runtime.step.recorded import Recorded
from hemiola.runtime.step.steps import AllSteps


@dataclass
class Text:
    """What the ledger knows of a request, which the host may learn some steps later."""

    id: int
    ids: np.ndarray
    prompt_len: int
    total_len: int
    limit: int  # what total_len may become


class Scripted:
    """Proposes what `script(text, room)` returns, cut to the room there is."""

    def __init__(self, script: Callable[[Text, int], Sequence[int]]) -> None:
        self.script = script

    def drive(self, steps: AllSteps) -> None:
        """From now on these drafts take the place of what the steps propose."""
        self.ledger = steps.ledger
        self._drive_eager(steps)
        if isinstance(steps.whole, Captured):
            self._drive_captured(steps.whole)
        elif steps.whole is not None:
            self._drive_recorded(steps.whole)

    def _drive_eager(self, steps: AllSteps) -> None:
        eager, run = steps.eager, steps.eager.run

        def run_and_propose(plan: Plan, feed: Feed) -> None:
            run(plan, feed)
            self.propose(plan, feed.answers, feed.width)

        eager.run = run_and_propose

    def _drive_captured(self, captured: Captured) -> None:
        run, launch, plans = captured.run, captured.launch, []

        def launch_known(plan: Plan, ready: Ready, bucket: Bucket) -> object:
            plans.append(plan)
            return launch(plan, ready, bucket)

        def run_and_propose(bucket: Bucket) -> CapturedResult:
            result = run(bucket)
            answers = result.told[MARKS:].view(bucket.rows, -1)
            self.propose(plans.pop(), answers, captured.width(bucket))
            return result

        captured.launch, captured.run = launch_known, run_and_propose

    def _drive_recorded(self, recorded: Recorded) -> None:
        launch = recorded.launch

        def launch_and_propose(plan: Plan, packed: PackedPlan) -> StepOutput:
            output = launch(plan, packed)
            answers = torch.frombuffer(output.numbers, dtype=torch.int64)[MARKS:].view(len(plan.rows), -1)
            self.propose(plan, answers, output.width)
            return output

        recorded.launch = launch_and_propose

    def propose(self, plan: Plan, answers: torch.Tensor, width: int) -> None:
        """Behind a step, into the ledger, and into what the host reads."""
        self._propose(plan)
        ledger, slots = self.ledger, [row.slot_id for row in plan.rows]
        (places,) = upload(ledger.device, np.array(slots, np.int64))
        num, total_len = ledger.lengths[DRAFTS, places], ledger.lengths[TOTAL, places]
        answers[: len(slots), width + PROPOSED] = num
        told = answers.shape[1] - width - ANSWERS
        at = total_len.unsqueeze(1) + torch.arange(told, device=ledger.device)
        answers[: len(slots), width + ANSWERS :] = ledger.ids[places.unsqueeze(1), at].to(torch.int64)

    def _propose(self, plan: Plan) -> None:
        rows, ledger = [row for row in plan.rows if row.room > 0], self.ledger
        if not rows:
            return
        (asked,) = upload(ledger.device, np.array([row.slot_id for row in rows], np.int64))
        ledger.num_drafts.index_fill_(0, asked, 0)
        total_lens, nums, all_ids = here(ledger.total_len, ledger.num_drafts, ledger.ids)
        drafts = np.zeros((len(rows), max(row.room for row in rows)), np.int64)
        num_drafts = np.zeros(len(rows), np.int64)
        for n, row in enumerate(rows):
            request, ids = row.request, all_ids[row.slot_id].numpy()
            assert nums[row.slot_id] == 0, "drafts of an earlier step"
            text = Text(request.id, ids, request.prompt_len, int(total_lens[row.slot_id]), len(request.ids))
            own = list(self.script(text, row.room))[: row.room]
            drafts[n, : len(own)], num_drafts[n] = own, len(own)
        slots = np.array([row.slot_id for row in rows], np.int64)
        set_drafts(ledger, *upload(ledger.device, slots, drafts, num_drafts))


def set_drafts(ledger: Ledger, slots: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> None:
    """The first num_drafts[n] of drafts[n] stand behind the text of slots[n]."""
    places = ledger.total_len[slots].unsqueeze(1) + torch.arange(drafts.shape[1], device=ledger.device)
    ledger.ids[slots.unsqueeze(1), places] = drafts.to(torch.int32)
    ledger.num_drafts[slots] = num_drafts


def always_right(next_token: Callable[[Sequence[int]], int]) -> Scripted:
    """The oracle's own tokens."""

    def script(request: Text, room: int) -> list[int]:
        ids = request.ids[: request.total_len].tolist()
        for _ in range(room):
            ids.append(next_token(ids))
        return ids[request.total_len :]

    return Scripted(script)


def shuffled(seed: int, next_token: Callable[[Sequence[int]], int], vocab: int) -> Scripted:
    """Windows of random length, right up to a random place and random behind it; a third of them empty."""
    rng = random.Random(seed)
    right = always_right(next_token)

    def script(request: Text, room: int) -> list[int]:
        length = rng.choice([0, rng.randint(1, room), room])
        good = rng.randint(0, length)
        return [*right.script(request, length)[:good], *(rng.randrange(vocab) for _ in range(length - good))]

    return Scripted(script)
