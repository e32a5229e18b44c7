"""Greedy tokens of real engines equal the oracle's under any schedule, and logits the plain run's bits.

Storage is poisoned, the caches are audited after every step. Without drafts and without reuse: those are in
test_engine_drafts.py and test_matrix.py.
"""

import random
from collections.abc import Callable

import pytest
from kit.engine_hand import NUM_TOKENS, EngineHand, Wanted, prompt

FAMILIES = ["nemotron_h_moe", "qwen3_5"]  # Mamba2 + attention + experts; gated delta rule + attention
PAGE, CHUNK = 32, 16
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, 2 * PAGE, 100]
MIXED = [1, 3, CHUNK, PAGE - 1, PAGE + 1, 3 * CHUNK + 5, 100]


@pytest.fixture
def plain_hand(engine_hands: Callable[..., EngineHand]) -> Callable[..., EngineHand]:
    def make(family: str, **options: object) -> EngineHand:
        return engine_hands(family, "plain", {"max_step_tokens": 256}, prefix_cache=False, **options)

    return make


def check(hand: EngineHand, wanted: Wanted, family: str, ids: dict[int, int]) -> None:
    for length, request_id in ids.items():
        hand.check(request_id, wanted(family, prompt(length)))


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(plain_hand: Callable, wanted: Wanted, family: str) -> None:
    hand = plain_hand(family)
    for length in LENGTHS:
        request_id = hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        hand.run()
        check(hand, wanted, family, {length: request_id})


@pytest.mark.parametrize("max_step_tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches(plain_hand: Callable, wanted: Wanted, family: str, max_step_tokens: int) -> None:
    """Shuffled arrivals, some of them while others run."""
    dice = random.Random(max_step_tokens)
    hand = plain_hand(family, max_step_tokens=max_step_tokens)
    ids = {}
    for length in dice.sample(MIXED, len(MIXED)):
        ids[length] = hand.submit(prompt(length), max_tokens=NUM_TOKENS)
        for _ in range(dice.choice([0, 1, 5])):
            hand.turn()
    hand.run()
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_per_step(plain_hand: Callable, wanted: Wanted, family: str) -> None:
    hand = plain_hand(family, max_step_tokens=1, max_rows=1)
    ids = {length: hand.submit(prompt(length), max_tokens=NUM_TOKENS) for length in (1, CHUNK + 1, PAGE + 1)}
    hand.run()
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_and_aborts(plain_hand: Callable, wanted: Wanted, family: str) -> None:
    """Room for two requests at most, random preemptions and aborts among seven."""
    dice = random.Random(1)
    hand = plain_hand(family, max_len=192, num_pages=8, max_step_tokens=3 * CHUNK)
    ids = {length: hand.submit(prompt(length), max_tokens=NUM_TOKENS) for length in MIXED}
    doomed = [hand.submit(prompt(length + 1), max_tokens=NUM_TOKENS) for length in MIXED]
    scheduler = hand.loop.scheduler
    while not hand.idle:
        hand.turn()
        if scheduler.running and dice.random() < 0.05:
            hand.preempt(scheduler.running[-1])
        if doomed and dice.random() < 0.2:
            hand.loop.abort(doomed.pop(dice.randrange(len(doomed))))
    assert scheduler.num_preemptions > 3
    check(hand, wanted, family, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_plain_runs_bits(plain_hand: Callable, family: str) -> None:
    """Alone, token by token behind the prompt; and chunked, mixed, late and preempted."""
    alone = plain_hand(family, max_rows=1)
    crowd = plain_hand(family, max_len=192, num_pages=12, max_step_tokens=CHUNK + 9)
    for hand in (alone, crowd):
        for length in MIXED:
            hand.submit(prompt(length), max_tokens=NUM_TOKENS)
            hand.turn()
        hand.run()
        hand.check_logits()
        assert len(hand.recorded) == len(MIXED) * NUM_TOKENS
    assert crowd.loop.scheduler.num_preemptions > 0
