"""The passes of an MTP head on a CPU ask the head what they ask it on any device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine import compiled
from hemiola.runtime.engine.drafts.mtp import MtpProposer
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Plan, Row

SLOTS, WIDTH, FEATURES, RING, VOCAB, CHUNK = 9, 60, 5, 6, 23, 4


class Head:
    """Its results follow from what it is asked, which it keeps."""

    def __init__(self) -> None:
        self.asked: list[dict[str, torch.Tensor]] = []

    def draft(self, **inputs: torch.Tensor) -> Computed:
        self.asked.append({name: value.clone() for name, value in inputs.items()})
        states = inputs["hidden"] * 0.5 + inputs["token_ids"].unsqueeze(1)
        states = states[inputs["logits_ids"].long()]
        return Computed(torch.sin(states.sum(1, keepdim=True) * torch.arange(1.0, VOCAB + 1)), states)


class World:
    """A ledger, a ring and a head, the same for every seed."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        limits: Any = SimpleNamespace(num_slots=SLOTS, max_len=WIDTH - 4, num_drafts=3)
        self.ledger, self.head = Ledger(limits, torch.device("cpu")), Head()
        self.ledger.ids[1:] = torch.randint(VOCAB, (SLOTS - 1, WIDTH), generator=rng, dtype=torch.int32)
        self.ring = torch.randn(SLOTS, RING, FEATURES, generator=rng)
        self.pages: Any = SimpleNamespace(table=np.arange(SLOTS * 2, dtype=np.int32).reshape(SLOTS, 2))
        self.plan = Plan([self._row(slot, rng) for slot in range(1, 6)])
        self.batch = compiled.fill(self.plan, self.pages.table, self.ledger)
        self.hidden = torch.randn(len(self.batch.token_ids), FEATURES, generator=rng)
        logits = torch.randn(len(self.batch.logits_ids), VOCAB, generator=rng)
        compiled.judge(self.batch, logits, self.ledger, CHUNK)
        self.proposer = MtpProposer(self.head, self.ring, self.pages, self.ledger, VOCAB)

    def _row(self, slot: int, rng: torch.Generator) -> Row:
        kind, committed, drafts, room = (int(torch.randint(n, (), generator=rng)) for n in (4, 20, 4, 4))
        committed += RING
        num_tokens, drafts = (9, 0) if kind == 0 else (1 + drafts, drafts)
        self.ledger.committed_len[slot] = committed
        self.ledger.edge[slot] = committed // CHUNK * CHUNK
        self.ledger.total_len[slot] = committed + (20 if kind == 0 else 1)
        self.ledger.num_drafts[slot] = drafts
        params = SamplingParams(temperature=0.8 if kind == 3 else 0.0)
        request: Any = SimpleNamespace(rule=Rule(params, slot, 3, frozenset()), guide=None)
        return Row(
            request, slot, num_tokens, drafts, kind > 0, int(kind == 2), (0, 0), reads=kind != 1 or room > 1,
            room=room * (kind > 0) * (kind != 1 or room > 1),
            snapshot_slot=8 if slot == 1 else 0, snapshot_edge=(committed // CHUNK + 1) * CHUNK,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_the_head_is_asked_the_same_and_the_same_is_kept(seed: int) -> None:
    mine, other = World(seed), World(seed)
    mine.proposer.propose(mine.plan, mine.batch, mine.hidden)
    other.proposer.propose_anywhere(other.plan, other.batch, other.hidden)
    assert len(mine.head.asked) == len(other.head.asked)
    for ours, wanted in zip(mine.head.asked, other.head.asked, strict=True):
        for name, value in wanted.items():
            assert torch.equal(ours[name], value), name
    for name in ("ids", "total_len", "num_drafts"):
        assert torch.equal(getattr(mine.ledger, name)[1:], getattr(other.ledger, name)[1:]), name
    assert torch.equal(mine.ring[1:], other.ring[1:])
