"""A whole step of fixed sizes, its parts launched: what the functions of tensors make of it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.fake_session import resolved

pytest.importorskip("triton")

from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.head import Best, Head
from hemiola.runtime.device.session import Computed
from hemiola.runtime.device.transfer import fence
from hemiola.runtime.engine.decode import Decoder
from hemiola.runtime.engine.drafts.mtp import MtpProposer
from hemiola.runtime.engine.launched import LaunchedDecoder
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Plan
from tests.gpu.laws import DEVICE, on_gpu
from tests.runtime.engine.test_bucket import a_row

pytestmark = on_gpu
FEATURES, VOCAB, CHUNK, DRAFTS = 24, 7, 16, 3
SIZES = {
    "max_len": 192,
    "page_len": 16,
    "chunk_len": CHUNK,
    "max_step_tokens": 70,
    "num_pages": 90,
    "num_slots": 15,
}
RULES = {"greedy": {}, "drawn": {"temperature": 0.9, "seed": 5}, "logprobs": {"logprobs": 2}}


class Model:
    """Trunk and head, whose results follow from what they are asked, which they keep."""

    def __init__(self, tells_best: bool) -> None:
        self.tells_best, self.asked = tells_best, []

    def run(self, batch: object) -> Computed:
        names = ("rows", "page_table", "token_ids", "positions", "logits_ids")
        return self._found({name: getattr(batch, name) for name in names})

    def draft(self, **inputs: torch.Tensor) -> Computed:
        return self._found(inputs, inputs["hidden"])

    def _found(self, inputs: dict[str, torch.Tensor], before: torch.Tensor | float = 1.0) -> Computed:
        self.asked.append({name: value.clone() for name, value in inputs.items()})
        numbers = inputs["token_ids"] * 3 + inputs["positions"]
        channels = torch.arange(1, FEATURES + 1, device=DEVICE)
        hidden = torch.sin(numbers.unsqueeze(1) * channels) + 0.5 * before
        lines = hidden[inputs["logits_ids"].long()]
        logits = torch.round(4 * torch.sin(9 * lines[:, :VOCAB]))
        logits[lines[:, 8] > 1.4] = torch.nan
        best = Best(logits.amax(1), logits.argmax(1))
        head = Head(lambda lines: logits, lambda lines: best) if self.tells_best else None
        return Computed(logits, lines if "hidden" in inputs else hidden, head)


class World:
    """A decoder in the middle of five texts, the same for every seed."""

    def __init__(self, kind: type[Decoder], seed: int, drafts: str, tells_best: bool) -> None:
        num = DRAFTS if drafts == "mtp" else 0
        config = resolved(drafts=drafts, num_drafts=num, max_rows=6, **SIZES)
        rng = torch.Generator().manual_seed(seed)
        self.pages = PagePool(config.num_pages, config.page_len, config.num_slots, 12)
        self.ledger, self.model = Ledger(config, torch.device(DEVICE)), Model(tells_best)
        shape = (config.num_slots, CHUNK + DRAFTS + 1, FEATURES)
        self.ring = torch.randn(shape, generator=rng).to(DEVICE)
        proposer: Any = SimpleNamespace(propose_fed=lambda *given: None)
        if drafts == "mtp":
            proposer = MtpProposer(self.model, self.ring, self.pages, self.ledger, VOCAB)
            proposer.launches = kind is LaunchedDecoder
        self.decoder = kind(config, self.ledger, self.pages, self.model, proposer)
        ids = torch.randint(VOCAB, self.ledger.ids.shape, generator=rng)
        self.ledger.ids[1:] = ids[1:].int().to(DEVICE)

    def open(self, slot: int, length: int) -> None:
        """A text of which all but the last token is committed."""
        self.pages.grow(slot, length + 40)
        ledger = self.ledger
        ledger.total_len[slot], ledger.committed_len[slot] = length, length - 1
        ledger.edge[slot] = (length - 1) // CHUNK * CHUNK


def plan_of(dice: random.Random, world: World, drafts: str, values: dict) -> Plan:
    """Rows as a scheduler makes them: some draft, some only read, some owe pairs, some take snapshots."""
    rows = []
    for slot in dice.sample(range(1, 7), dice.randint(1, 6)):
        length = int(world.ledger.committed_len[slot])
        room = dice.choice([0, 1, DRAFTS]) if drafts == "mtp" else 0
        num = dice.randint(0, DRAFTS) if drafts == "mtp" else 0
        made = a_row(num, slot, values, room=room, reads=room > 0 or dice.random() < 0.5)
        made.request.params = made.request.rule.params
        made.owed = dice.choice([0, min(5, length)]) if made.reads and drafts == "mtp" else 0
        if dice.random() < 0.5:
            made.snapshot_slot, made.snapshot_edge = 7 + slot, (length // CHUNK + 1) * CHUNK
        rows.append(made)
    return Plan(rows)


@pytest.mark.parametrize("drafts", ["none", "mtp"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_any_device(seed: int, rules: str, drafts: str) -> None:
    print("seed", seed)
    dice = random.Random(seed)
    mine = World(LaunchedDecoder, seed, drafts, rules == "greedy")
    other = World(Decoder, seed, drafts, False)
    for slot in range(1, 7):
        length = CHUNK * dice.randint(1, 5) + dice.choice([-1, 0, 0, 3])  # edges are near
        for world in (mine, other):
            world.open(slot, length)
            rule = Rule(a_row(values=RULES[rules]).request.rule.params, 3, 1, frozenset())
            world.decoder.open(slot, rule)
    for _ in range(5):
        plan = plan_of(dice, other, drafts, RULES[rules])
        bucket = mine.decoder.fit(plan)
        assert bucket is not None
        answers = [world.decoder.launch(plan, bucket) for world in (mine, other)]
        fence(mine.ledger.device)()
        check(plan, *answers)
        for ours, wanted in zip(mine.model.asked, other.model.asked, strict=True):
            check_asked(ours, wanted)
        for name in ("lengths", "ids"):
            assert torch.equal(getattr(mine.ledger, name), getattr(other.ledger, name)), name
        assert torch.equal(mine.ring[1:], other.ring[1:])


def check(plan: Plan, ours: Any, wanted: Any) -> None:
    """What the host is told."""
    assert torch.equal(ours.num_drafts, wanted.num_drafts)
    for name in ("num_accepted", "num_judged", "broken"):
        assert torch.equal(getattr(ours.verdict, name), getattr(wanted.verdict, name)), name
    for n, row in enumerate(plan.rows):
        part = slice(row.num_tokens)
        assert torch.equal(ours.verdict.token_ids[n, part], wanted.verdict.token_ids[n, part])
    assert ours.verdict.logprobs.keys() == wanted.verdict.logprobs.keys()


def check_asked(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Of rows that are somebody's, and of their tokens."""
    rows = wanted["rows"]
    live = rows[:, 3] > 0
    assert torch.equal(ours["rows"][live], rows[live])
    assert torch.equal(ours["page_table"][live], wanted["page_table"][live])
    if len(wanted["logits_ids"]) == len(live):
        assert torch.equal(ours["logits_ids"][live], wanted["logits_ids"][live])
    at = [token for first, num in rows[live, :2].tolist() for token in range(first, first + num)]
    for name in ours.keys() - {"rows", "page_table", "logits_ids"}:
        assert torch.equal(ours[name][at], wanted[name][at]), name
