"""With drafts of any kind and quality, greedy tokens are the oracle's and logits the plain run's bits.

Storage is poisoned, the caches are audited after every step.
"""

import random
from collections.abc import Callable

import pytest
from kit.engine_hand import NUM_TOKENS, EngineHand, Wanted, prompt

FAMILIES = ["nemotron_h_moe", "qwen3_5"]  # Mamba2 + attention + experts; gated delta rule + attention
PAGE, CHUNK = 32, 16
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, 100]
KINDS = ["mtp", "ngram", "scripted"]  # scripted: windows of every length, right, wrong and both


@pytest.mark.parametrize("num_drafts", [1, 3, 2 * CHUNK + 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_with_preemption(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str, num_drafts: int
) -> None:
    """Prompts around every edge, arriving while others run; too few pages; K beyond two chunks."""
    dice = random.Random(num_drafts)
    sizes = {"max_len": 192, "num_pages": 12, "max_rows": 5, "max_step_tokens": 3 * CHUNK}
    hand = engine_hands(family, kind, {"num_drafts": num_drafts}, **sizes)
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
            hand.preempt(scheduler.running[-1])
    for length, request_id in ids.items():
        hand.check(request_id, wanted(family, prompt(length)))
    hand.check_contents()
    metrics = [hand.last(request_id).metrics for request_id in ids.values()]
    assert scheduler.num_preemptions > 0 and sum(sum(m.drafted) for m in metrics) > 0
    if kind == "scripted":
        accepted, drafted = (sum(sum(getattr(m, name)) for m in metrics) for name in ("accepted", "drafted"))
        assert 0.2 * drafted < accepted < 0.9 * drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_drafts_are_the_plain_runs_bits(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str
) -> None:
    lengths = [1, CHUNK, PAGE + 1, 100]
    sizes = {"max_len": 192, "num_pages": 9, "max_rows": 4, "max_step_tokens": CHUNK + 9}
    hand = engine_hands(family, kind, {"num_drafts": 5}, **sizes)
    for length in lengths:
        hand.submit(prompt(length), max_tokens=NUM_TOKENS)
    hand.run()
    for request in hand.requests:
        hand.check(request.id, wanted(family, prompt(request.prompt_len)))
    hand.check_logits()
    hand.check_contents()
    assert len(hand.recorded) == len(lengths) * NUM_TOKENS


@pytest.mark.parametrize("kind", ["mtp", "ngram"])
def test_a_seeded_sample_is_the_same_with_and_without_drafts(
    engine_hands: Callable[..., EngineHand], kind: str
) -> None:
    """Not only the distribution: acceptance compares with the draw that would have been made anyway."""
    outputs = {}
    for name in ("plain", kind):
        hand = engine_hands("qwen3_5", name, {"num_drafts": 5})
        ids = [
            hand.submit(prompt(20), max_tokens=NUM_TOKENS, temperature=0.7, top_p=0.9, seed=s)
            for s in range(4)
        ]
        hand.run()
        hand.check_logits()
        outputs[name] = [hand.token_ids(request_id) for request_id in ids]
    assert outputs["plain"] == outputs[kind] and outputs["plain"][0] != outputs["plain"][1]
