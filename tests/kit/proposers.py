"""Drafters for tests, right, wrong, random or scripted: no output may depend on what they propose."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
        for row in plan.rows:
            if row.room > 0:
                request = row.request
                total_len = int(self.ledger.total_len[row.slot_id])
                assert self.ledger.num_drafts[row.slot_id] == 0, "drafts of an earlier step"
                ids = self.ledger.ids[row.slot_id].cpu().numpy()
                text = Text(request.id, ids, request.prompt_len, total_len, len(request.ids))
                drafts = list(self.script(text, row.room))[: row.room]
                places = (
                    torch.tensor(x, device=self.ledger.device)
                    for x in ([row.slot_id], [drafts], [len(drafts)])
                )
                self.ledger.set_drafts(*places)

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


def always_wrong(next_token: Callable[[Sequence[int]], int], vocab: int) -> Scripted:
    """Never the oracle's token."""
    right = always_right(next_token)
    return Scripted(lambda request, room: [(t + 1) % vocab for t in right.script(request, room)])


def shuffled(seed: int, next_token: Callable[[Sequence[int]], int], vocab: int) -> Scripted:
    """Windows of random length, right up to a random place and random behind it; a third of them empty."""
    rng = random.Random(seed)
    right = always_right(next_token)

    def script(request: Text, room: int) -> list[int]:
        length = rng.choice([0, rng.randint(1, room), room])
        good = rng.randint(0, length)
        return [*right.script(request, length)[:good], *(rng.randrange(vocab) for _ in range(length - good))]

    return Scripted(script)
