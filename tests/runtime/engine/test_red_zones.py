"""Engines whose kernels write to nothing but their results, their scratch, states and the ledger."""

import random
from collections.abc import Callable, Iterator

import pytest
from kit.engine_hand import CHUNK, DEVICE, NUM_DRAFTS, PAGE, Wanted
from kit.redzones import red_zones

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compiled kernels are a CPU's")
LENGTHS = [1, 2, CHUNK - 1, CHUNK, PAGE + 1, 2 * PAGE + NUM_DRAFTS, 5 * PAGE]


@pytest.fixture(autouse=True)
def between_red_zones() -> Iterator[None]:
    with red_zones(engines=True):
        yield


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "three_convs", "attention_only"])
def test_rows_of_all_lengths_write_to_their_own_memory_alone(
    small_hand: Callable, wanted: Wanted, family: str, kind: str
) -> None:
    """Prompts and decodes beside each other, drafts accepted and not; later ones begin at a hit."""
    hand, text = small_hand(family, kind), wanted.story(family)
    for lengths in (LENGTHS, random.Random(0).sample(LENGTHS, len(LENGTHS))):
        for length in lengths:
            hand.submit(text[:length], max_tokens=11)
        hand.run()
    for request in hand.requests:
        if request.prompt_len >= 3:
            hand.check(request.id, text[request.prompt_len : request.prompt_len + 11])
    hand.check_logits()
    assert hand.loop.steps.whole.num_steps > 0
