"""Everything at once on the fake session: whatever happens, every output is the oracle's.

    make storm STORMS=1000 SEED=0

A storm is 200 turns of random arrivals of several priorities (some continue or branch from earlier texts,
some follow a grammar, some have penalties, some want their prompt scored, some come n at once, some go on
where another engine ended), drafts, aborts, preemptions, flushes and rows that fail, with random sizes; in
some storms pages are scarce, in some a request is cancelled in every turn, one in three is starved
(kit/starved.py). Prefixes leave for other engines and come from them (kit/carried.py). Every hit is checked
against all that is cached. After every turn: ownership, and the content of all that is cached; free pages
hold poison. A red storm prints its seed; `test_a_storm_of_choice` lets hypothesis shrink.
"""

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.fake_storms import Storm

STORMS = int(os.environ.get("STORMS", "60"))
SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm(make_hand: Callable, tmp_path: Path, seed: int) -> None:
    """One in eight over a file."""
    print("seed", seed)
    storm = Storm(make_hand, random.Random(seed), tmp_path if seed % 8 == 7 else None)
    storm.rage()
    storm.end()


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
def test_a_storm_is_repeated_by_its_seed(make_hand: Callable, seed: int) -> None:
    """However fast the machine happens to be."""
    runs, pauses = [], random.Random(seed)
    for pause in (0.0, 1e-3):
        storm = Storm(make_hand, random.Random(seed), adaptive_drafts=True, num_drafts=3)
        session = storm.hand.loop.storage
        session.before_run = lambda batch, pause=pause: time.sleep(pauses.random() * pause)
        storm.rage()
        runs.append(session.shapes)
    assert runs[0] == runs[1]


REACHED = [
    "no recurrences",
    "requests of two priorities ran",
    "a newcomer took the place of a worse one within a step",
    "waiting improved a priority",
    "a row got no page",
    "all pages were held",
    "preempted",
    "cancelled",
    "n > 1",
    "grammar",
    "penalties",
    "drafts stayed",
    "drafts fell",
    "NaN",
    "a grammar raised",
    "a listener raised",
    "a prompt was scored",
    "an output went on",
    "prefixes went and came",
    "stop",
    "length",
]


def test_storms_reach_all_that_they_are_for(make_hand: Callable) -> None:
    """Aborts and preemptions of requests of any age, in flight and at rest; and everything in REACHED."""
    seen, reached, with_cancels = set(), Counter(), 0
    for seed in range(16):
        storm = Storm(make_hand, random.Random(seed))
        storm.rage()
        with_cancels += storm.chances.abort == 1.0
        storm.end()
        seen |= storm.seen
        reached += storm.reached
    for kind in itertools.product(("abort", "preempt"), (True, False)):
        assert len({age for *move, age in seen if tuple(move) == kind}) > 5, kind
    assert [name for name in REACHED if reached[name] < 3] == [] and with_cancels > 1, reached


MOVES = st.lists(
    st.sampled_from(["arrive", "abort", "preempt", "flush", "turn", "turn", "turn"]), max_size=80
)


@settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))
@given(dice=st.randoms(use_true_random=False), moves=MOVES)
def test_a_storm_of_choice(make_hand: Callable, dice: random.Random, moves: list[str]) -> None:
    """Shrinks to the shortest sequence of moves that breaks something."""
    storm = Storm(make_hand, dice)
    for move in moves:
        getattr(storm, move)()
    storm.end()
