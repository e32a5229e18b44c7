"""The promise on engines that were cut, whose parts may round by what runs beside: tokens are the oracle's.

Logits are not the plain run's, bit for bit: onnxruntime's depend on the number of rows.
"""

import random
from collections.abc import Callable

import pytest
from kit.engine_hand import NUM_DRAFTS, PAGE, SMALL, Wanted, windows

CUT = SMALL | {"target": "onnxruntime"}
FAMILIES = ["nemotron_h_moe", "qwen3_5"]


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "scripted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_hits_chunks_and_neighbours_leave_the_tokens_of_the_oracle(
    engine_hands: Callable, wanted: Wanted, family: str, kind: str
) -> None:
    hand = engine_hands(family, kind, CUT, max_rows=3, max_step_tokens=64, pipeline_depth=1)
    text = wanted.story(family)
    ids = {}
    for n in (100, 7, 100, 37, 130, 68):
        ids[hand.submit(text[:n], max_tokens=30)] = n
        hand.turn()
    hand.run()
    for request_id, n in ids.items():
        hand.check(request_id, text[n : n + 30])
    assert sum(hand.last(request_id).metrics.cached_tokens for request_id in ids) >= 100
    if kind == "scripted":
        assert sum(sum(hand.last(request_id).metrics.accepted) for request_id in ids) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_every_length(engine_hands: Callable, wanted: Wanted, family: str) -> None:
    """M1 of the matrix (test_matrix.py), with the head's drafts."""
    hand, text = engine_hands(family, "mtp", CUT, prefix_cache=False), wanted.story(family)
    lengths = range(3, 3 * PAGE + NUM_DRAFTS + 3, 5)
    for length in random.Random(0).sample(lengths, len(lengths)):
        hand.submit(text[:length], max_tokens=5)
    hand.run()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : request.prompt_len + 5])


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_every_length_accepted_to_any_length(
    engine_hands: Callable, wanted: Wanted, answers: Callable, family: str
) -> None:
    """M2, with accepted counts by chance."""
    dice, text = random.Random(2), wanted.story(family)
    proposer = windows(answers(family), lambda request: dice.randrange(NUM_DRAFTS + 1))
    hand = engine_hands(family, "scripted", CUT, proposer=proposer)
    hand.submit(text[:3], max_tokens=120)
    hand.run()
    hand.check(1, text[3:123])
    assert sum(hand.last(1).metrics.accepted) > 40
