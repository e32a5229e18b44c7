"""The state in a slot is a function of the text, after any step."""

import itertools
from collections.abc import Callable

import pytest
from kit.engine_hand import PAGE as B
from kit.engine_hand import SMALL, EngineHand, Wanted, right_and_wrong

K = SMALL["num_drafts"]


@pytest.mark.parametrize("kind", ["mtp", "mtp, right and wrong"])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5", "three_convs"])
def test_edge_states_after_every_step_are_the_plain_runs(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str
) -> None:
    """States, columns, records and MTP hidden states of every slot, bit for bit: behind cold prompts and
    hits, chunks, windows of every length, with neighbours, and after a preemption."""
    options: dict = {"num_drafts": 3, "max_rows": 3, "max_step_tokens": B + 3}
    if kind != "mtp":
        right = right_and_wrong(lambda ids, num: wanted(family, ids, num), seed=3)
        options |= {"num_drafts": K, "max_step_tokens": 3 * K + 9, "proposer": right}
    hand = engine_hands(family, "mtp", SMALL, **options)
    text = wanted.story(family)
    arrivals = {0: (3, 24), 4: (2 * B + 1, 12), 9: (2 * B + 7, 12), 12: (B, 7)}  # turn: prompt and output
    for turn in itertools.count():
        if turn in arrivals:
            length, num_tokens = arrivals[turn]
            hand.submit(text[:length], max_tokens=num_tokens)
        elif turn > max(arrivals) and hand.idle:
            break
        elif turn == 11:
            hand.preempt(hand.loop.scheduler.running[-1])
        hand.turn()
        hand.check_running()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : len(request.ids)])
    assert hand.loop.scheduler.prefix.statistics.num_hits > 0 and hand.loop.scheduler.num_preemptions > 0
    hand.check_contents()
