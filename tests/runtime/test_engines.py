"""Greedy tokens of real engines equal the oracle's under any schedule; exact logits the plain run's bits.

Storage is poisoned, the caches are audited after every step.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import Oracle

from hemiola.runtime import manifest
from hemiola.runtime.batch import Batch
from hemiola.runtime.cache.storage import Storage
from hemiola.runtime.config import ServeConfig, resolve
from hemiola.runtime.llm import make_loop
from hemiola.runtime.request import Bounds
from hemiola.runtime.session import Output, Session

FAMILIES = ["nemotron_h_moe", "qwen3_5"]  # Mamba2 + attention + experts; gated delta rule + attention
PAGE, CHUNK, NUM_TOKENS = 32, 16, 40
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, 2 * PAGE, 100]
MIXED = [1, 3, CHUNK, PAGE - 1, PAGE + 1, 3 * CHUNK + 5, 100]


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 320), k=length)


class Recorder:
    """A session that keeps the logits of its last step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.logits: list[torch.Tensor] = []

    def run(self, batch: Batch) -> Output:
        out = self.session.run(batch)
        self.logits = list(out.logits.clone())
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


@pytest.fixture
def real_hand(tiny_engine: Callable[..., Path], make_hand: Callable) -> Callable:
    def make(family: str, numerics: str = "fast", **options: object) -> object:
        engine_dir = tiny_engine(family, numerics=numerics)
        found = manifest.load(engine_dir)
        config = resolve(ServeConfig(drafts="none", **options), found, 2**30)
        storage = Storage(found.states, config.num_pages, config.num_slots, poison=True)
        recorder = Recorder(Session(engine_dir, found, storage, config.drafts))
        hand = make_hand()  # for its class
        bounds = Bounds(config.max_len, found.limits.max_len, found.vocab_size, ())
        return type(hand)(make_loop(config, storage, recorder, None), bounds)

    return make


def check(hand: object, wanted: Callable, family: str, ids: dict[int, int]) -> None:
    for length, request_id in ids.items():
        assert hand.last(request_id).finish_reason == "length", hand.last(request_id).error
        assert hand.token_ids(request_id) == wanted(family, length), f"prompt of {length}"


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone(real_hand: Callable, wanted: Callable, family: str, numerics: str) -> None:
    hand = real_hand(family, numerics)
    for length in LENGTHS:
        request_id = hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        hand.run()
        check(hand, wanted, family, {length: request_id})


@pytest.mark.parametrize("max_step_tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches(real_hand: Callable, wanted: Callable, family: str, max_step_tokens: int) -> None:
    """Shuffled arrivals, some of them while others run."""
    dice = random.Random(max_step_tokens)
    hand = real_hand(family, max_step_tokens=max_step_tokens)
    ids = {}
    for length in dice.sample(MIXED, len(MIXED)):
        ids[length] = hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        for _ in range(dice.choice([0, 1, 5])):
            hand.turn()
    hand.run()
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_per_step(real_hand: Callable, wanted: Callable, family: str) -> None:
    hand = real_hand(family, max_step_tokens=1, max_rows=1)
    ids = {length: hand.submit(prompt(length), max_tokens=NUM_TOKENS) for length in (1, CHUNK + 1, PAGE + 1)}
    hand.run()
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_and_aborts(real_hand: Callable, wanted: Callable, family: str, numerics: str) -> None:
    """Room for two requests at most, random preemptions and aborts among seven."""
    dice = random.Random(1)
    hand = real_hand(family, numerics, max_len=192, num_pages=8, max_step_tokens=3 * CHUNK)
    ids = {length: hand.submit(prompt(length), max_tokens=NUM_TOKENS) for length in MIXED}
    doomed = [hand.submit(prompt(length + 1), max_tokens=NUM_TOKENS) for length in MIXED]
    scheduler = hand.loop.scheduler
    while not hand.idle:
        hand.turn()
        if scheduler.running and dice.random() < 0.05:
            scheduler._preempt(scheduler.running[-1])
        if doomed and dice.random() < 0.2:
            hand.loop.abort(doomed.pop(dice.randrange(len(doomed))))
    assert scheduler.num_preemptions > 3
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_logits_are_the_plain_runs_bits(real_hand: Callable, family: str) -> None:
    """Plain: alone, the prompt in one step. Then chunked, mixed, late and preempted."""
    plain = {}
    for length in MIXED:
        hand = real_hand(family, "exact")
        record(hand)
        hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        hand.run()
        plain[length] = dict(hand.recorded)
    hand = real_hand(family, "exact", max_len=192, num_pages=12, max_step_tokens=CHUNK + 9)
    record(hand)
    for length in MIXED:
        hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        hand.turn()
    hand.run()
    assert hand.loop.scheduler.num_preemptions > 0
    compared = 0
    for length, positions in plain.items():
        for before, logits in positions.items():
            assert torch.equal(hand.recorded[before], logits), f"prompt of {length}, position {len(before)}"
            compared += 1
    assert compared == len(MIXED) * NUM_TOKENS


def record(hand: object) -> None:
    """Keep the logits of every new token, by all the ids before it."""
    hand.recorded = {}
    commit = hand.loop.scheduler.commit

    def keep(plan: object, verdict: object) -> None:
        logits = iter(hand.loop.session.logits)
        for request, token_ids in zip(plan.rows, verdict.token_ids, strict=True):
            if token_ids:
                hand.recorded[tuple(request.ids[: request.total_len].tolist())] = next(logits)
        commit(plan, verdict)

    hand.loop.scheduler.commit = keep
