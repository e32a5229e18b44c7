"""Drafters for tests, right, wrong, random or scripted: no output may depend on what they propose."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kit.demands import here

from hemiola.runtime.device.transfer import upload
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.step import Batch, Plan


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

    def __call__(self, ledger: Ledger) -> "Scripted":
        """Into a loop."""
        self.ledger = ledger
        return self

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        rows, ledger = [row for row in plan.rows if row.room > 0], self.ledger
        if not rows:
            return
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
        ledger.set_drafts(*upload(ledger.device, slots, drafts, num_drafts))

    def propose_fed(self, *step: object) -> None:
        """In a bucket who asks calls `propose` afterwards (EngineHand)."""


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
