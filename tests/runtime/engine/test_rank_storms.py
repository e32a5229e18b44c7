"""Everything at once (test_engine_storms.py) on engines of 2 and 4 ranks, which are threads.

After every step each follower's ledger is compared with the leader's.

    RANK_STORMS=100 SEED=0 pytest tests/runtime/engine/test_rank_storms.py
"""

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest
from kit.engine_hand import DEVICE, SMALL, EngineHand, Wanted
from kit.engine_storms import RULES, storm

from hemiola.runtime.step import ranked

STORMS = int(os.environ.get("RANK_STORMS", "2"))
SEED = int(os.environ.get("SEED", "8"))  # those before are of the last test
NUM_TURNS = 60
ENGINES = [
    ("nemotron_h_divisible", 2),
    ("qwen3_5_moe_divisible", 4),
    ("qwen3_5_moe_divisible", 2),
    ("nemotron_h_divisible", 4),
]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks run on CPUs")


def run(engine_hands: Callable[..., EngineHand], wanted: Wanted, seed: int, **narrow: str) -> Counter[str]:
    """A storm; what it reached. narrow: how the engine is built that has another greedy text."""
    print("seed", seed)
    dice, (family, tp) = random.Random(seed), ENGINES[seed % 4]
    built = SMALL | {"num_drafts": 5, "tp": tp} | narrow
    page_len, max_rows = SMALL["page_len"], dice.choice([2, 4])
    hand = engine_hands(
        family,
        ["mtp", "mtp", "ngram"][seed // 4 % 3],
        built,
        max_rows=max_rows,
        max_len=6 * page_len,
        max_step_tokens=dice.choice([max_rows, page_len - 1, 3 * page_len + 1]),
        num_drafts=dice.choice([1, 3, 5]),
        num_snapshots=dice.choice([1, 2, 20]),
        snapshot_interval=dice.choice([0, page_len]),
        num_pages=dice.choice([7, 9, 14, 40]),
        pipeline_depth=seed % 3,
        cuda_graphs=bool(seed // 2 % 2),  # steps in buckets
        shuffle=dice,
        host_cache_bytes=dice.choice([0, 2**21, 2**24]),
    )
    reached = storm(
        hand, dice, lambda number: wanted.story(family, number, 100), NUM_TURNS, is_told=not narrow
    )
    if (host := hand.loop.scheduler.prefix.host) is not None:
        reached["found on the host"] += host.statistics.num_hits
    assert hand.ranks is not None and isinstance(hand.loop.steps, ranked.RankedSteps)
    assert hand.ranks.num_compared == hand.loop.steps._number * (tp - 1) > 0
    reached["prefix hits"] += hand.loop.scheduler.prefix.statistics.num_hits
    return reached


@pytest.fixture(autouse=True)
def every_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "CHECKED_EVERY", 1)


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm(engine_hands: Callable[..., EngineHand], wanted: Wanted, seed: int) -> None:
    run(engine_hands, wanted, seed)


def test_a_storm_over_codes(engine_hands: Callable[..., EngineHand], wanted: Wanted) -> None:
    """Weights, pages and the drafts' head: each rank has its own part of them."""
    run(engine_hands, wanted, 2, quantize="int4", kv_dtype="turboquant_4bit_nc", draft_head="int4")


def test_storms_reach_all_that_they_are_for(engine_hands: Callable[..., EngineHand], wanted: Wanted) -> None:
    reached: Counter[str] = Counter()
    for seed in range(8):
        reached += run(engine_hands, wanted, seed)
    ends = ("length", "stop", "cancelled", "error")
    moves = ("n > 1", "requests of two priorities ran", "preempted by the scheduler", "drafts stayed")
    names = (*RULES, *ends, *moves, "found on the host", "prefix hits")
    assert [name for name in names if not reached[name]] == [], reached
