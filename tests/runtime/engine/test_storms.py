"""Everything at once on the fake session: whatever happens, every output is the oracle's.

    make storm STORMS=1000 SEED=0

A storm is 200 turns of random arrivals (some continue or branch from earlier texts, some follow a grammar),
drafts, aborts, preemptions and flushes, with random sizes. Every hit is checked against all that is cached.
After every turn: ownership, and the content of all that is cached; free pages hold poison. A red storm prints
its seed; `test_a_storm_of_choice` lets hypothesis shrink.
"""

import itertools
import os
import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.fake_session import POISON, VOCAB, hashed, oracle
from kit.guided import ASKED, EOS, compiled, guided_oracle
from kit.proposers import Scripted, shuffled

from hemiola.runtime.engine.pace import Pace
from hemiola.runtime.engine.request import Request

STORMS = int(os.environ.get("STORMS", "60"))
SEED = int(os.environ.get("SEED", "0"))
NUM_TURNS = 200


def sizes_of(dice: random.Random) -> dict[str, int | bool]:
    max_rows = dice.choice([1, 2, 4, 9])
    page_len = dice.choice([4, 8, 16])
    max_len = dice.choice([64, 96])
    least = max_len // page_len + 1
    prefix_cache = dice.random() < 0.8
    return {
        "max_rows": max_rows,
        "max_len": max_len,
        "page_len": page_len,
        "chunk_len": dice.choice([2, 4]),
        "max_step_tokens": dice.choice([max_rows, max_rows + 3, 17, 64]),
        "num_pages": dice.choice([least, least + 3, 2 * least, 5 * least]),
        "num_drafts": dice.choice([0, 1, 3, 9]),
        "prefix_cache": prefix_cache,
        "num_slots": max_rows + 1 + (dice.choice([0, 1, 3, 20]) if prefix_cache else 0),
        "snapshot_interval": page_len * dice.choice([0, 0, 1, 3]) if prefix_cache else 0,
        "adaptive_drafts": dice.random() < 0.5,
        "pipeline_depth": dice.choice([0, 1, 2]),
    }


def with_a_fake_clock(pace: Pace, seed: int) -> None:
    """What it is told of time comes from the seed: adaptive drafts are the same on any machine."""
    dice, timed = random.Random(seed), pace.timed
    per_draft = dice.choice([0.0, 0.1, 1.0])

    def told(num_rows: int, num_drafts: int, num_passes: int, step: float, drafting: float) -> None:
        step = (1 + 0.1 * num_rows + per_draft * num_drafts) * dice.uniform(0.5, 2)
        timed(num_rows, num_drafts, num_passes, step, 0.1 * per_draft * num_passes)

    pace.timed = told


class Storm:
    """Moves that may come at any time; each leaves the house in order."""

    def __init__(self, make_hand: Callable, dice: random.Random, **changes: int | bool) -> None:
        self.dice = dice
        sizes = sizes_of(dice) | changes
        proposer: Scripted | None = None
        if sizes["num_drafts"]:
            proposer = shuffled(dice.randrange(2**30), self.next_token, VOCAB)
        self.hand = make_hand(proposer=proposer, hybrid=dice.random() < 0.8, **sizes)
        with_a_fake_clock(self.hand.loop.scheduler.pace, dice.randrange(2**30))
        self.max_len = sizes["max_len"]
        self.asked: dict[int, list[int]] = {}  # the output that a request must have
        self.guided: dict[tuple[int, ...], int] = {}  # what follows a text of a request with a grammar
        self.texts: list[list[int]] = []
        self.aborted: set[int] = set()
        self.seen: set[tuple[str, bool, int]] = set()  # moves, against requests in flight, of so many tokens

    def next_token(self, ids: Sequence[int]) -> int:
        return self.guided.get(tuple(ids), hashed(ids))

    def arrive(self) -> None:
        dice = self.dice
        prompt = dice.choices(range(VOCAB), k=dice.randint(1, 40))
        if self.texts and dice.random() < 0.6:
            text = dice.choice(self.texts)
            prompt = text[: dice.randint(1, len(text))] + prompt[: dice.randint(0, 9)]
        prompt = prompt[: self.max_len - 1]
        params = {
            "max_tokens": dice.randint(1, 30),
            "priority": dice.choice([0, 0, 0, 1, -1]),
            "cache_salt": dice.choice(["", "", "other"]),
            "num_drafts": dice.choice([None, None, 0]),
        }
        most = min(params["max_tokens"], self.max_len - len(prompt))
        if dice.random() < 0.3:
            pattern = dice.choice(list(ASKED))
            output = guided_oracle(prompt, most, pattern)
            for at, token_id in enumerate(output):
                self.guided[(*prompt, *output[:at])] = token_id
            request_id = self.hand.submit(prompt, compiled(pattern), stop_token_ids=[EOS], **params)
        else:
            output = oracle(prompt, most)
            request_id = self.hand.submit(prompt, **params)
        self.asked[request_id] = output
        self.texts.append(prompt + output)

    def abort(self) -> None:
        """Anyone who has not heard of an end, at times one who has."""
        going = [r for r in self.hand.requests if self.dice.random() < 0.02 or not self.hand.ended(r.id)]
        if going:
            request = self.dice.choice(going)
            self._see("abort", request)
            self.aborted.add(request.id)
            self.hand.loop.abort(request.id)

    def preempt(self) -> None:
        running = [r for r in self.hand.loop.scheduler.running if r.finish_reason is None]
        if running:
            request = self.dice.choice(running)
            self._see("preempt", request)
            self.hand.preempt(request)

    def _see(self, move: str, request: Request) -> None:
        self.seen.add((move, request.in_flight > 0, request.total_len - request.prompt_len))

    def flush(self) -> None:
        self.hand.loop.scheduler.prefix.flush()

    def turn(self) -> None:
        self.hand.turn()
        session, pages = self.hand.loop.session, self.hand.loop.scheduler.prefix.pages
        assert (session.pages[pages._free] == POISON).all(), "somebody wrote a page that nobody owns"

    def rage(self) -> None:
        for _ in range(NUM_TURNS):
            for move, chance in (
                (self.arrive, 0.25),
                (self.abort, 0.04),
                (self.preempt, 0.06),
                (self.flush, 0.01),
            ):
                if self.dice.random() < chance and (move != self.arrive or len(self.asked) < 60):
                    move()
            self.turn()

    def end(self) -> None:
        self.hand.run()
        for request_id, output in self.asked.items():
            got, last = self.hand.token_ids(request_id), self.hand.last(request_id)
            assert got == output[: len(got)], f"request {request_id}"
            assert len(got) == len(output) or last.finish_reason == "cancelled", last
            assert last.finish_reason != "cancelled" or request_id in self.aborted
            assert sum(piece.finish_reason is not None for piece in self.hand.pieces[request_id]) == 1
        scheduler = self.hand.loop.scheduler
        scheduler.prefix.flush()
        scheduler.audit()
        assert scheduler.prefix.pages.num_free == scheduler.prefix.pages.num_pages - 1, "pages are lost"
        assert scheduler.slots.num_free == scheduler.slots.num_slots - 1, "slots are lost"


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm(make_hand: Callable, seed: int) -> None:
    print("seed", seed)
    storm = Storm(make_hand, random.Random(seed))
    storm.rage()
    storm.end()


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
def test_a_storm_is_repeated_by_its_seed(make_hand: Callable, seed: int) -> None:
    """However fast the machine happens to be."""
    runs, pauses = [], random.Random(seed)
    for pause in (0.0, 1e-3):
        storm = Storm(make_hand, random.Random(seed), adaptive_drafts=True, num_drafts=3)
        session = storm.hand.loop.session
        session.before_run = lambda batch, pause=pause: time.sleep(pauses.random() * pause)
        storm.rage()
        runs.append(session.shapes)
    assert runs[0] == runs[1]


def test_storms_abort_and_preempt_requests_of_any_age_in_flight_and_at_rest(make_hand: Callable) -> None:
    seen = set()
    for seed in range(12):
        storm = Storm(make_hand, random.Random(seed))
        storm.rage()
        seen |= storm.seen
    for kind in itertools.product(("abort", "preempt"), (True, False)):
        assert len({age for *move, age in seen if tuple(move) == kind}) > 5, kind


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
