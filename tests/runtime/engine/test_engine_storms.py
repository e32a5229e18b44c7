"""M15: everything at once on real tiny engines; the long storms are those of test_storms.py.

    ENGINE_STORMS=200 SEED=0 pytest tests/runtime/engine/test_engine_storms.py

A storm is 60 turns of random arrivals (prompts that begin, continue or leave greedy texts; of several
priorities; greedy, drawn, with penalties, with grammars), drafts, aborts, preemptions, flushes and faults,
with random sizes. At random turns all cached contents are recomputed.
"""

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest
from kit.engine_hand import SMALL, EngineHand, Wanted
from kit.engine_storms import RULES, storm

from hemiola.runtime.step.recorded import Recorded

STORMS = int(os.environ.get("ENGINE_STORMS", "24"))
SEED = int(os.environ.get("SEED", "0"))
REACHED: dict[int, Counter[str]] = {}  # by seed: the storms of this process, which the last test needs, too
NUM_TURNS = 60
FAMILIES = ["nemotron_h_moe", "qwen3_5", "three_convs", "attention_only"]
ENGINES = [
    {"page_len": 32, "chunk_len": 16, "num_drafts": 5},
    SMALL,
]


def a_hand(engine_hands: Callable[..., EngineHand], dice: random.Random, seed: int) -> EngineHand:
    family, built = FAMILIES[seed % 4], ENGINES[seed // 4 % 2]
    kind = ["mtp", "mtp", "ngram", "scripted"][seed % 7 % 4]
    page_len, max_rows = built["page_len"], dice.choice([1, 2, 4])
    num_drafts = dice.choice([1, 3, 5] if kind == "mtp" else [1, 3, built["num_drafts"]])
    pages = {} if dice.random() < 0.3 else {"num_pages": dice.choice([7, 9, 14])}
    return engine_hands(
        family,
        kind,
        built,
        max_rows=max_rows,
        max_len=6 * page_len,
        max_step_tokens=dice.choice([max_rows, page_len - 1, page_len, 3 * page_len + 1]),
        num_drafts=num_drafts,
        num_snapshots=dice.choice([1, 2, 20]),
        snapshot_interval=dice.choice([0, 0, page_len]),
        pipeline_depth=seed % 3,
        cuda_graphs=bool(seed // 3 % 2),  # steps in buckets
        adaptive_drafts=bool(seed % 2),  # which has more of them
        shuffle=dice,
        host_cache_bytes=dice.choice([0, 2**20, 2**24]),
        **pages,
    )


def a_storm(engine_hands: Callable[..., EngineHand], wanted: Wanted, seed: int) -> Counter[str]:
    """A storm; what it reached."""
    print("seed", seed)
    dice = random.Random(seed)
    hand, family = a_hand(engine_hands, dice, seed), FAMILIES[seed % 4]
    if seed % 2:  # as an adaptive pace does: stretches without drafts, whose pairs the head reads later
        idle = random.Random(seed)
        hand.loop.scheduler.pace.choose = lambda requests, most: [
            idle.choice([0, 0, 0, min(m, 1), m]) for m in most
        ]
    reached = storm(hand, dice, lambda number: wanted.story(family, number, 100), NUM_TURNS)
    if (host := hand.loop.scheduler.prefix.host) is not None:
        reached["found on the host"] += host.statistics.num_hits
    if isinstance(hand.loop.steps.whole, Recorded):
        assert hand.loop.steps.whole.num_steps == hand.num_plain_steps, (
            "a step without rules was not one call"
        )
    return reached


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm(engine_hands: Callable[..., EngineHand], wanted: Wanted, seed: int) -> None:
    REACHED[seed] = a_storm(engine_hands, wanted, seed)


def test_storms_reach_all_that_they_are_for(engine_hands: Callable[..., EngineHand], wanted: Wanted) -> None:
    reached: Counter[str] = Counter()
    for seed in range(36):
        reached += REACHED.get(seed) or a_storm(engine_hands, wanted, seed)
    ends = ("length", "stop", "cancelled", "error")
    moves = (
        "n > 1",
        "requests of two priorities ran",
        "preempted by the scheduler",
        "drafts stayed",
        "found on the host",
    )
    assert [name for name in (*RULES, *ends, *moves) if reached[name] < 3] == [], reached
