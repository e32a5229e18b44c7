"""With drafts of any kind and quality, in crowds, tokens are the oracle's and logits the plain run's bits."""

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
    while hand.goes_on():
        if scheduler.running and dice.random() < (0.05 if num_drafts < CHUNK else 0.3):
            hand.preempt(scheduler.running[-1])
    for length, request_id in ids.items():
        hand.check(request_id, wanted(family, prompt(length)))
    hand.end()
    metrics = [hand.last(request_id).metrics for request_id in ids.values()]
    assert scheduler.num_preemptions > 0 and sum(sum(m.drafted) for m in metrics) > 0
    if kind == "scripted":
        accepted, drafted = (sum(sum(getattr(m, name)) for m in metrics) for name in ("accepted", "drafted"))
        assert 0.2 * drafted < accepted < 0.9 * drafted
