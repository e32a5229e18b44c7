"""The fake session checks every batch; here: who runs when, and that nothing of it changes a token."""

import random
from collections.abc import Callable

import pytest
from kit.fake_session import VOCAB, hashed, oracle
from kit.hand import Hand, prompt
from kit.proposers import Scripted, always_right

from hemiola.runtime.schedule.plan import Outcome, Plan
from hemiola.runtime.schedule.request import Request


def test_decode_rows_come_first_then_prompts_then_new_requests(make_hand: Callable) -> None:
    hand = make_hand(max_step_tokens=16)
    first, second, third = hand.submit(prompt(4)), hand.submit(prompt(30)), hand.submit(prompt(3))
    hand.turn()
    plan = hand.loop.scheduler.plan()
    assert [row.request.id for row in plan.rows] == [first, second, third]
    # the prompt's chunk ends on an edge, which leaves room for the newcomer
    assert [row.num_tokens for row in plan.rows] == [1, 12, 3]


@pytest.mark.parametrize(("budget", "length", "chunks"), [(11, 30, [8, 8, 8, 6]), (3, 8, [3, 1, 3, 1])])
def test_chunks_end_on_edges_where_the_budget_allows(
    make_hand: Callable, budget: int, length: int, chunks: list[int]
) -> None:
    hand = make_hand(max_step_tokens=budget, max_rows=1)
    hand.submit(prompt(length), max_tokens=1)
    hand.run()
    assert hand.loop.storage.shapes == [(num,) for num in chunks]


def test_a_large_request_is_not_overtaken_for_ever(make_hand: Callable) -> None:
    hand = make_hand(num_pages=9)  # exactly one request of max_len
    hand.submit(prompt(8), max_tokens=30)
    large = hand.submit(prompt(50), max_tokens=10)
    small = [hand.submit(prompt(2, seed), max_tokens=5) for seed in range(5)]
    hand.run()
    for other in small:
        assert hand.last(other).metrics.first_scheduled >= hand.last(large).metrics.first_scheduled


@pytest.mark.parametrize("num_pages", [9, 10])
def test_a_newcomer_is_not_let_in_to_be_thrown_out(make_hand: Callable, num_pages: int) -> None:
    """The first needs one more page soon; the newcomer would take the last ones and lose them again.

    With 9 pages, page 0 included, there are too few for the newcomer; with 10 just enough, but none is spare.
    """
    hand = make_hand(num_pages=num_pages)
    hand.submit(prompt(8), max_tokens=30)
    hand.turn()
    newcomer = hand.submit(prompt(48), max_tokens=8)
    hand.run()
    assert hand.loop.scheduler.num_preemptions == 0
    assert hand.token_ids(newcomer) == oracle(prompt(48), 8)


@pytest.mark.parametrize("num_pages", [9, 10, 11, 13, 17])
def test_preemption_changes_no_token(make_hand: Callable, num_pages: int) -> None:
    hand = make_hand(num_pages=num_pages, max_step_tokens=13)
    ids = [hand.submit(prompt(6 + seed, seed), max_tokens=40) for seed in range(6)]
    hand.run()
    for seed, request_id in enumerate(ids):
        assert hand.token_ids(request_id) == oracle(prompt(6 + seed, seed), 40)
        assert hand.last(request_id).metrics.num_output_tokens == 40
    assert hand.loop.scheduler.num_preemptions > 0
    assert hand.last(ids[0]).metrics.num_preemptions == 0, "the oldest gives way to nobody"


def test_a_preempted_request_loses_a_state_that_stands_at_a_pages_edge(make_hand: Callable) -> None:
    """No slot is left for snapshots: its own becomes one."""
    hand = make_hand(prefix_cache=True, max_rows=1, num_slots=2)
    hand.submit(prompt(3), max_tokens=40)
    (request,) = hand.requests
    while request.committed_len < 16:
        hand.turn()
    hand.preempt(request)
    hand.run()
    assert hand.token_ids(request.id) == oracle(prompt(3), 40)
    assert request.hit_len == 16 and request.metrics.num_preemptions == 1


def test_wrong_drafts_that_might_have_passed_several_pages_cost_a_row_its_snapshots(
    make_hand: Callable,
) -> None:
    """The host plans without knowing that they are wrong."""
    wrong = Scripted(lambda text, room: [(hashed(text.ids[: text.total_len]) + 1) % VOCAB] * room)
    hand = make_hand(proposer=wrong, num_drafts=12, prefix_cache=True, pipeline_depth=1)
    hand.submit(prompt(3), max_tokens=50)
    (request,), scheduler = hand.requests, hand.loop.scheduler
    hand.turn()
    while request.slot_id:
        passed = scheduler.slots.edge[request.slot_id] // 8 * 8
        snapshots = [entry.edge for _, entry in scheduler.prefix.contents() if entry.slot_id]
        assert max(snapshots, default=0) == passed
        hand.turn()


def test_an_idle_plan_is_empty(make_hand: Callable) -> None:
    assert make_hand().loop.scheduler.plan() == Plan()


class Pairs:
    """Whether a drafting head has read a page's pairs when others may find the page; and when rows read."""

    def __init__(self, hand: Hand) -> None:
        self.steps: list[int] = []  # rows that read
        self._plan, self._read = Plan(), dict[int, int]()  # by slot: the committed tokens when it last read
        self._hand, scheduler = hand, hand.loop.scheduler
        self._commit, self._publish = scheduler.commit, scheduler.prefix.commit
        scheduler.commit = self.commit
        if scheduler.prefix.enabled:
            scheduler.prefix.commit = self.publish

    def commit(self, plan: Plan, outcome: Outcome) -> None:
        self._plan, config = plan, self._hand.loop.config
        self.steps.append(sum(row.reads for row in plan.rows))
        assert all(row.owed + row.num_tokens <= config.chunk_len for row in plan.rows if row.owed)
        self._commit(plan, outcome)
        self._read |= {row.slot_id: row.request.committed_len for row in plan.rows if row.reads}

    def publish(self, slot_id: int, valid_len: int, known_len: int, *more: int) -> None:
        page_len = self._hand.loop.config.page_len
        (row,) = (row for row in self._plan.rows if row.slot_id == slot_id)
        full = min(valid_len, known_len) // page_len * page_len
        assert row.reads or full - 1 <= self._read[slot_id], "a page was published whose pairs are owed"
        self._publish(slot_id, valid_len, known_len, *more)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_page_that_others_may_find_has_all_its_pairs(make_hand: Callable, seed: int, depth: int) -> None:
    """Rows draft by fits and starts; in between their pairs wait."""
    dice = random.Random(seed)
    sizes = {"max_len": 256, "page_len": 16, "chunk_len": 8, "num_drafts": 3, "num_pages": 40}
    hand = make_hand(proposer=always_right(hashed), prefix_cache=True, pipeline_depth=depth, **sizes)
    pairs, lull = Pairs(hand), [0]

    def choose(requests: list[Request], most: list[int]) -> list[int]:
        lull[0] = lull[0] - 1 if lull[0] else dice.choice([0, 0, 5, 30])
        return [0 if lull[0] else dice.choice([0, num]) for num in most]

    hand.loop.scheduler.pace.choose = choose
    for n in range(6):
        hand.submit(prompt(5 + 9 * n, n), max_tokens=120)
    hand.run()
    assert 0 in pairs.steps


def test_rows_that_began_one_after_the_other_come_to_read_their_pairs_together(make_hand: Callable) -> None:
    """Where no page must be finished: each of four rows every 8 steps, and not in half of all steps."""
    sizes = {"max_len": 256, "page_len": 16, "chunk_len": 8, "num_drafts": 3}
    hand = make_hand(proposer=always_right(hashed), **sizes)
    hand.loop.scheduler.pace.choose = lambda requests, most: [0] * len(most)
    pairs = Pairs(hand)
    for n in range(4):
        hand.submit(prompt(16, n), max_tokens=200)
        hand.turn()
        hand.turn()
    for _ in range(100):
        hand.turn()
    last = pairs.steps[-64:]
    assert 8 <= sum(num > 0 for num in last) <= 16 and 32 <= sum(last) <= 64
