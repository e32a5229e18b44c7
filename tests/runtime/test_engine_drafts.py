"""With drafts of any kind and quality, greedy tokens are the oracle's and exact logits the plain run's.

Storage is poisoned, the caches are audited after every step.
"""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from proposers import Scripted, Text

from hemiola.runtime import manifest
from hemiola.runtime.accept import Outcome
from hemiola.runtime.batch import Batch
from hemiola.runtime.cache.storage import Storage
from hemiola.runtime.config import ServeConfig, resolve
from hemiola.runtime.llm import make_loop, prefix_cost
from hemiola.runtime.request import Bounds
from hemiola.runtime.scheduler import Plan
from hemiola.runtime.session import Output, Session

FAMILIES = ["nemotron_h_moe", "qwen3_5"]  # Mamba2 + attention + experts; gated delta rule + attention
PAGE, CHUNK, NUM_TOKENS = 32, 16, 40
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, 100]
KINDS = {
    "mtp": {"drafts": "mtp"},
    "ngram": {"drafts": "ngram", "ngram_min": 1},
    "right and wrong": {"drafts": "ngram"},  # of which the proposer is replaced
}


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 320), k=length)


class Recorder:
    """A session that keeps the logits of the steps under way."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.draft = session.draft
        self.logits: deque[torch.Tensor] = deque()

    def run(self, batch: Batch) -> Output:
        out = self.session.run(batch)
        self.logits.append(out.logits.clone())
        return out


@pytest.fixture(scope="module")
def wanted(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str, int], list[int]]:
    oracles: dict[str, Oracle] = {}
    known: dict[tuple[str, int], list[int]] = {}

    def get(family: str, length: int) -> list[int]:
        if family not in oracles:
            oracles[family] = Oracle(tiny_checkpoint(family))
        if (family, length) not in known:
            known[family, length] = oracles[family].generate(prompt(length), NUM_TOKENS).token_ids
        return known[family, length]

    return get


def right_and_wrong(wanted: Callable[[str, int], list[int]], family: str, seed: int) -> Scripted:
    """Windows of any length, the oracle's tokens up to a random place; a quarter of the windows is empty."""
    dice = random.Random(seed)

    def script(request: Text, room: int) -> list[int]:
        done = request.total_len - request.prompt_len
        ids = wanted(family, request.prompt_len)[done : done + dice.choice([0, 1, room, room])]
        good = dice.choice([0, 1, len(ids), len(ids)])
        return [token if at < good else (token + 1) % 320 for at, token in enumerate(ids)]

    return Scripted(script)


@pytest.fixture
def real_hand(tiny_engine: Callable[..., Path], make_hand: Callable, wanted: Callable) -> Callable:
    def make(family: str, kind: str, numerics: str, num_drafts: int, **options: object) -> object:
        engine_dir = tiny_engine(family, numerics=numerics, num_drafts=num_drafts, max_step_tokens=512)
        found = manifest.load(engine_dir)
        config = resolve(ServeConfig(**KINDS.get(kind, {"drafts": "none"}), **options), found, 2**30)
        storage = Storage(found.states, config.num_pages, config.num_slots, poison=True)
        session = Recorder(Session(engine_dir, found, storage, config.drafts))
        scripted = right_and_wrong(wanted, family, num_drafts) if kind == "right and wrong" else None
        bounds = Bounds(config.max_len, found.limits.max_len, found.vocab_size, ())
        hand = type(make_hand())(
            make_loop(config, storage, session, None, prefix_cost(found), proposer=scripted), bounds
        )
        record(hand)
        return hand

    return make


def record(hand: object) -> None:
    """Keep the logits that each token was chosen from, by all the ids before it."""
    hand.recorded = {}
    commit = hand.loop.scheduler.commit

    def keep(plan: Plan, outcome: Outcome) -> None:
        logits = hand.loop.session.logits.popleft()
        first = 0
        for n, row in enumerate(plan.rows):
            if not row.chooses:
                continue
            request, token_ids = row.request, outcome.token_ids[n]
            ids = [*request.ids[: request.total_len].tolist(), *token_ids]
            for at in range(len(token_ids) if request.finish_reason is None else 0):
                hand.recorded[tuple(ids[: request.total_len + at])] = logits[first + at]
            first += 1 + row.num_drafts
        commit(plan, outcome)

    hand.loop.scheduler.commit = keep


def check(hand: object, wanted: Callable, family: str, ids: dict[int, int]) -> None:
    for length, request_id in ids.items():
        assert hand.last(request_id).finish_reason == "length", hand.last(request_id).error
        assert hand.token_ids(request_id) == wanted(family, length), f"prompt of {length}"


@pytest.mark.parametrize("num_drafts", [1, 3, 2 * CHUNK + 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_with_preemption(
    real_hand: Callable, wanted: Callable, family: str, kind: str, num_drafts: int
) -> None:
    """Prompts around every edge, arriving while others run; too few pages; K beyond two chunks."""
    dice = random.Random(num_drafts)
    hand = real_hand(
        family, kind, "fast", num_drafts, max_len=192, num_pages=12, max_rows=5, max_step_tokens=3 * CHUNK
    )
    ids = {}
    lengths = LENGTHS if num_drafts < CHUNK else LENGTHS[::3]
    for length in dice.sample(lengths, len(lengths)):
        ids[length] = hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        for _ in range(dice.choice([0, 1, 5])):
            hand.turn()
    scheduler = hand.loop.scheduler
    while not hand.idle:
        hand.turn()
        if scheduler.running and dice.random() < (0.05 if num_drafts < CHUNK else 0.3):
            scheduler._preempt(scheduler.running[-1])
    check(hand, wanted, family, ids)
    metrics = [hand.last(request_id).metrics for request_id in ids.values()]
    assert scheduler.num_preemptions > 0 and sum(sum(m.drafted) for m in metrics) > 0
    if kind == "right and wrong":
        accepted, drafted = (sum(sum(getattr(m, name)) for m in metrics) for name in ("accepted", "drafted"))
        assert 0.2 * drafted < accepted < 0.9 * drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_logits_with_drafts_are_the_plain_runs_bits(
    real_hand: Callable, wanted: Callable, family: str, kind: str
) -> None:
    """Plain: alone, the prompt in one step, no drafts."""
    lengths = [1, CHUNK, PAGE + 1, 100]
    plain = {}
    for length in lengths:
        hand = real_hand(family, "plain", "exact", 5)
        hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        hand.run()
        plain |= hand.recorded
    hand = real_hand(
        family, kind, "exact", 5, max_len=192, num_pages=9, max_step_tokens=CHUNK + 9, max_rows=4
    )
    ids = {length: hand.submit(prompt(length), max_tokens=NUM_TOKENS) for length in lengths}
    hand.run()
    check(hand, wanted, family, ids)
    assert len(plain) == len(lengths) * NUM_TOKENS
    for before, logits in plain.items():
        assert torch.equal(hand.recorded[before], logits), f"position {len(before)}"


@pytest.mark.parametrize("kind", ["mtp", "ngram"])
def test_a_seeded_sample_is_the_same_with_and_without_drafts(real_hand: Callable, kind: str) -> None:
    """Not only the distribution: acceptance compares with the draw that would have been made anyway."""
    outputs = {}
    for name in ("plain", kind):
        hand = real_hand("qwen3_5", name, "exact", 3)
        ids = [
            hand.submit(prompt(20), max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.9, seed=s)
            for s in range(4)
        ]
        hand.run()
        outputs[name] = [hand.token_ids(request_id) for request_id in ids]
    assert outputs["plain"] == outputs[kind] and outputs["plain"][0] != outputs["plain"][1]
