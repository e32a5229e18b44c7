"""Who waits for whom: no draft and no worse priority stands in the way of a request that could run."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from kit.fake_session import VOCAB, FakeSession, hashed, oracle, resolved
from kit.guided import compiled
from kit.hand import Hand, prompt
from kit.proposers import always_right, shuffled

from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.schedule.request import Request
from hemiola.runtime.schedule.scheduler import Scheduler


def turns_until_it_runs(hand: Hand, request_id: int, most: int = 40) -> int:
    for turn in range(1, most):
        hand.turn()
        if hand.requests[request_id - 1] in hand.loop.scheduler.running:
            return turn
    raise AssertionError(f"request {request_id} waits for ever")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_drafts", "max_step_tokens"), [(3, 16), (3, 17), (3, 4), (0, 16), (0, 4), (3, 8)], ids=str
)
def test_drafts_do_not_keep_a_better_priority_out(
    make_hand: Callable, num_drafts: int, max_step_tokens: int, depth: int
) -> None:
    sizes = {"num_drafts": num_drafts, "max_step_tokens": max_step_tokens, "pipeline_depth": depth}
    hand = make_hand(proposer=always_right(hashed), max_rows=4, **sizes)
    worse = [hand.submit(prompt(4, seed), max_tokens=40, priority=5) for seed in range(4)]
    for _ in range(5):
        hand.turn()
    better = hand.submit(prompt(4, 9), max_tokens=4, priority=0)
    assert turns_until_it_runs(hand, better) <= 2 + depth
    hand.run()
    assert [hand.token_ids(i) for i in worse] == [oracle(prompt(4, seed), 40) for seed in range(4)]
    assert hand.token_ids(better) == oracle(prompt(4, 9), 4)


@pytest.mark.parametrize("max_step_tokens", [4, 5, 7])
def test_drafts_do_not_keep_a_newcomer_from_an_idle_row(make_hand: Callable, max_step_tokens: int) -> None:
    hand = make_hand(proposer=always_right(hashed), max_rows=4, num_drafts=3, max_step_tokens=max_step_tokens)
    drafting = hand.submit(prompt(4), max_tokens=50)
    for _ in range(3):
        hand.turn()
    newcomer = hand.submit(prompt(9), max_tokens=4)
    assert turns_until_it_runs(hand, newcomer) == 1
    hand.run()
    assert hand.token_ids(drafting) == oracle(prompt(4), 50)
    assert hand.token_ids(newcomer) == oracle(prompt(9), 4)


def test_a_prompt_of_worse_priority_does_not_keep_a_better_one_out(make_hand: Callable) -> None:
    hand = make_hand(max_rows=4, max_step_tokens=4)
    hand.submit(prompt(60), max_tokens=2, priority=5)
    hand.turn()
    better = hand.submit(prompt(6), max_tokens=2, priority=0)
    assert turns_until_it_runs(hand, better) == 1


def test_a_prompt_that_must_leave_is_read_no_further(make_hand: Callable) -> None:
    hand = make_hand(max_rows=1, max_step_tokens=4, pipeline_depth=1)
    hand.submit(prompt(60), priority=5)
    hand.turn()
    better = hand.submit(prompt(6), priority=0)
    assert turns_until_it_runs(hand, better) == 2


def test_prompts_are_read_in_order_of_rank(make_hand: Callable) -> None:
    """Not in that of their arrival: the third is worth more than the second, and the first was first."""
    hand = make_hand(max_rows=4, max_step_tokens=8, chunk_len=1)
    for seed, priority in enumerate((0, 1, 0)):
        hand.submit(prompt(30, seed), priority=priority)
    first, worse, better = hand.requests
    while worse.planned_len < 30:
        hand.turn()
        assert better.planned_len == 0 or first.planned_len == 30
        assert worse.planned_len == 0 or better.planned_len == 30


@pytest.mark.parametrize(("priority", "num_read"), [(None, 0), (-1, 13), (0, 7), (1, 7)])
def test_a_prompt_leaves_drafts_half_unless_it_is_of_better_priority(
    make_hand: Callable, priority: int | None, num_read: int
) -> None:
    sizes = {"max_rows": 2, "num_drafts": 13, "max_step_tokens": 14, "chunk_len": 1}
    hand = make_hand(proposer=always_right(hashed), **sizes)
    drafting = hand.submit(prompt(4), max_tokens=50)
    hand.turn()
    if priority is not None:
        hand.submit(prompt(40), priority=priority)
        hand.loop._read_inbox()
    found = hand.loop.scheduler.plan().rows
    assert [(row.request.id, row.num_tokens) for row in found[1:]] == [(2, num_read)] * bool(num_read)
    assert found[0].request.id == drafting and found[0].num_drafts == 13 - num_read


def test_a_request_that_gives_way_within_a_step_is_not_lost_for_a_newcomer_that_runs_twice(
    make_hand: Callable,
) -> None:
    """A cancelled request is still in flight, so the one that follows a grammar gets no page and no row: then
    the first newcomer takes its place at once, and it waits in front of the second.
    """
    sizes = {"pipeline_depth": 1, "num_pages": 9, "max_rows": 4, "max_step_tokens": 64}
    hand = make_hand(session=FakeSession(resolved(**sizes), lambda context: 0))  # "a", for ever
    cancelled = hand.submit(prompt(3), max_tokens=60)
    grammar = {"grammar": compiled(r"[a-f]{2,}x?"), "stop_token_ids": [VOCAB - 1]}
    lost = hand.submit(prompt(18), **grammar, priority=5, max_tokens=40)
    other, loser = hand.requests
    pages = hand.loop.scheduler.prefix.pages
    for _ in range(60):
        hand.turn()
        needs_page = loser.slot_id and loser.total_len == pages.capacity[loser.slot_id]
        if needs_page and not pages.num_free and not loser.in_flight and other.in_flight:
            break
    hand.loop.abort(cancelled)
    newcomers = [hand.submit(prompt(3, n), max_tokens=9, priority=5 * n) for n in (0, 1)]
    hand.run()
    assert [hand.token_ids(i) for i in (lost, *newcomers)] == [[0] * 40, [0] * 9, [0] * 9]
    assert loser.metrics.num_preemptions == 1


class Watch:
    """Looks at every plan of a scheduler: who waits, and for whom."""

    def __init__(self, scheduler: Scheduler, scarce: bool) -> None:
        self.scheduler, self.config, self.scarce = scheduler, scheduler.config, scarce
        self.patience: Counter[int] = Counter()  # plans in which it was first to wait, and worse ones ran
        self._plan, scheduler.plan = scheduler.plan, self.plan

    def plan(self) -> Plan:
        decoding = {r.id for r in self.scheduler.running if r.planned_len == r.start_len}
        plan = self._plan()
        slots = [row.slot_id for row in plan.rows]
        assert len(slots) == len(set(slots)) and {o.slot_id for o in plan.openings} <= set(slots)
        read = [row.request for row in plan.rows if row.request.id not in decoding]
        if self.scheduler.waiting:
            self._check_head(self.scheduler.waiting[0], read)
        if not self.scarce:
            self._check_shares(plan, read)
        return plan

    def _check_head(self, head: Request, read: list[Request]) -> None:
        running = self.scheduler.running
        behind = any(rank(request) < rank(head) for request in read)  # a prompt whose turn is before its own
        worse = any(r.priority > head.priority for r in running)
        self.patience[head.id] += worse and not behind
        most = (self.config.pipeline_depth + 1) * self.config.max_rows
        assert self.patience[head.id] <= most * (1 + head.metrics.num_preemptions), "worse ones run on"
        if not self.scarce:
            assert behind or len(running) == self.config.max_rows, "a row is idle, and one waits"

    def _check_shares(self, plan: Plan, read: list[Request]) -> None:
        rows = {row.request.id: row for row in plan.rows}
        running = [r for r in self.scheduler.running if not r.leaving and r.finish_reason is None]
        unread = [r for r in running if r.planned_len < r.start_len]
        for request in running:
            done = request.most_len == len(request.ids) or request in unread
            assert request.id in rows or done, "a row got no token"
        drafting = [row.request.priority for row in plan.rows if row.num_drafts]
        if drafting and unread:
            assert max(drafting) <= min(r.priority for r in unread), "drafts before a better prompt"
            spare = self.config.max_step_tokens - (len(rows) - len(read))
            assert sum(row.num_drafts for row in plan.rows) <= spare // 2, "drafts have more than half"


def rank(request: Request) -> tuple[int, int]:
    return request.priority, request.age


@pytest.mark.parametrize("seed", range(30))
def test_nobody_waits_for_drafts_or_for_worse_priorities(make_hand: Callable, seed: int) -> None:
    dice = random.Random(seed)
    max_rows = dice.choice([1, 2, 4])
    scarce = dice.random() < 0.4  # of pages
    hand = make_hand(
        proposer=dice.choice([always_right(hashed), shuffled(seed, hashed, VOCAB)]),
        max_rows=max_rows,
        max_step_tokens=max_rows + dice.choice([0, 1, 3, 12]),
        num_drafts=dice.choice([1, 3, 9]),
        pipeline_depth=dice.choice([0, 1, 2]),
        chunk_len=1,
        **({"num_pages": 9, "prefix_cache": dice.random() < 0.5} if scarce else {}),
    )
    Watch(hand.loop.scheduler, scarce)
    asked = {}
    for _ in range(150):
        if dice.random() < 0.3 and len(asked) < 40:
            ids, most = prompt(dice.randint(1, 40), seed), dice.randint(1, 24)
            asked[hand.submit(ids, max_tokens=most, priority=dice.choice([0, 0, 1, 5]))] = oracle(ids, most)
        hand.turn()
    hand.run()
    assert {i: hand.token_ids(i) for i in asked} == asked


def test_a_request_of_a_worse_priority_starves_behind_a_steady_stream_of_better_ones(
    make_hand: Callable,
) -> None:
    """Each limit that it waits raises it by one; from the best priority on only older ones precede it."""
    hand = make_hand(max_rows=2, num_pages=9, aging_s=10.0)
    now = [0.0]
    hand.loop.scheduler.clock = lambda: now[0]
    worse, stream = hand.submit(prompt(6), max_tokens=30, priority=5), 0
    while not hand.ended(worse):
        if sum(not hand.ended(request.id) for request in hand.requests) < 4:
            hand.submit(prompt(5, stream := stream + 1), max_tokens=8)
        hand.turn()
        now[0] += 1.0
        assert now[0] < 500, "it starves"
    request = hand.requests[worse - 1]
    assert hand.token_ids(worse) == oracle(prompt(6), 30) and request.priority == 0
    assert request.metrics.num_preemptions == 1, "before it waited; what it has gained holds while it runs"
    assert stream > 50 / 8


def test_waiting_gains_no_better_priority_than_there_is(make_hand: Callable) -> None:
    """Else those that wait longest would preempt others of their own class, in turns. Nor does the oldest."""
    hand = make_hand(max_rows=1, aging_s=1.0)
    now = [0.0]
    hand.loop.scheduler.clock = lambda: now[0]
    ids = [hand.submit(prompt(4, n), max_tokens=20, priority=3 + (n == 0)) for n in range(3)]
    for _ in range(200):
        now[0] += 10.0
        hand.turn()
    assert all(map(hand.ended, ids)) and hand.loop.scheduler.num_preemptions == 0
    assert {request.priority for request in hand.requests} == {3}


def test_a_preempted_request_keeps_what_it_gained_by_waiting_and_what_it_has_waited(
    make_hand: Callable,
) -> None:
    hand = make_hand(max_rows=1, aging_s=10.0)
    now = [0.0]
    hand.loop.scheduler.clock = lambda: now[0]
    best, worse = hand.submit(prompt(4), max_tokens=3), hand.submit(prompt(5), max_tokens=40, priority=4)
    hand.turn()
    now[0] = 25.0
    turns_until_it_runs(hand, worse)
    request = hand.requests[worse - 1]
    assert hand.ended(best) and request.priority == 2
    hand.preempt(request)
    now[0] += 9.0
    hand.submit(prompt(6), max_tokens=60)
    hand.turn()
    assert request.priority == 1 and request.slot_id == 0, "it had waited 5 s more before it ran"
    for _ in range(2):  # at 36 s and at 39 s
        now[0] += 2.5
        hand.turn()
        assert request.priority == 1, "a second was counted twice"


def test_a_request_that_is_preempted_again_and_again_starves(make_hand: Callable) -> None:
    """None of its waits is as long as the limit; together they are."""
    hand = make_hand(max_rows=1, max_step_tokens=8, aging_s=10.0)
    now = [0.0]
    hand.loop.scheduler.clock = lambda: now[0]
    low = hand.submit(prompt(56), max_tokens=2, priority=1)
    for seed in range(12):  # each better one runs for some 5 s of 9
        hand.submit(prompt(30, seed), max_tokens=1, priority=0)
        for _ in range(9):
            hand.turn()
            now[0] += 1
    assert hand.ended(low) and hand.last(low).metrics.num_preemptions > 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preempted_request_waits_in_front_of_younger_ones(make_hand: Callable, depth: int) -> None:
    hand = make_hand(max_rows=1, pipeline_depth=depth)
    older, younger = hand.submit(prompt(4), max_tokens=20), hand.submit(prompt(5), max_tokens=5)
    for _ in range(4):
        hand.turn()
    hand.preempt(hand.requests[older - 1])
    hand.run()
    first, second = hand.requests
    assert first.metrics.num_preemptions == 1 and second.metrics.num_preemptions == 0
    assert second.metrics.first_scheduled > first.metrics.last_token - 1e-9, "the younger one overtook"
    assert hand.token_ids(older) == oracle(prompt(4), 20) and hand.token_ids(younger) == oracle(prompt(5), 5)


def test_nobody_is_preempted_while_pages_of_a_cancelled_request_are_about_to_come_back(
    make_hand: Callable,
) -> None:
    hand = make_hand(max_rows=3, pipeline_depth=1, num_pages=9, max_step_tokens=64)
    ids = [hand.submit(prompt(length), max_tokens=50) for length in (8, 12, 13)]
    first, cancelled, last = hand.requests
    scheduler = hand.loop.scheduler
    pages = scheduler.prefix.pages
    for _ in range(40):
        needs_page = first.slot_id and first.most_len == pages.capacity[first.slot_id]
        if needs_page and not pages.num_free and cancelled.in_flight and last.in_flight:
            break
        hand.turn()
    assert scheduler.num_preemptions == 0 and needs_page and not pages.num_free
    hand.loop.abort(ids[1])
    for _ in range(4):
        hand.turn()
        assert scheduler.num_preemptions == 0 and not last.leaving
    hand.run()
    assert hand.token_ids(ids[0]) == oracle(prompt(8), 50)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_gives_its_pages_where_every_row_needs_one(make_hand: Callable, depth: int) -> None:
    """All come to the end of a page in the same step, and none is free: the pages of one are enough."""
    hand = make_hand(max_rows=4, pipeline_depth=depth, num_pages=17, max_step_tokens=64)
    ids = [hand.submit(prompt(16, n), max_tokens=32) for n in range(4)]
    scheduler = hand.loop.scheduler
    while scheduler.num_preemptions == 0:
        hand.turn()
    for _ in range(2 + depth):
        hand.turn()
    assert scheduler.num_preemptions == 1 and len(scheduler.running) == 3
    hand.run()
    assert [hand.token_ids(i) for i in ids] == [oracle(prompt(16, n), 32) for n in range(4)]
    assert max(hand.last(i).metrics.num_preemptions for i in ids) == 1, "it thrashes"


def test_two_prompts_leave_drafts_their_half_together(make_hand: Callable) -> None:
    sizes = {"max_rows": 3, "num_drafts": 13, "max_step_tokens": 14, "chunk_len": 1}
    hand = make_hand(proposer=always_right(hashed), **sizes)
    hand.submit(prompt(4), max_tokens=50)
    hand.turn()
    hand.submit(prompt(5)), hand.submit(prompt(40))
    hand.loop._read_inbox()
    rows = hand.loop.scheduler.plan().rows
    assert [row.num_tokens - row.num_drafts for row in rows] == [1, 5, 2] and rows[0].num_drafts == 6


@pytest.mark.parametrize(("priority", "num_read"), [(-1, 12), (0, 9), (3, 9), (5, 6), (9, 6)])
def test_a_prompt_leaves_tokens_to_drafts_of_the_same_or_a_better_priority_only(
    make_hand: Callable, priority: int, num_read: int
) -> None:
    sizes = {"max_rows": 3, "num_drafts": 3, "max_step_tokens": 14, "chunk_len": 1}
    hand = make_hand(proposer=always_right(hashed), **sizes)
    for own in (0, 5):
        hand.submit(prompt(4, own), max_tokens=50, priority=own)
    hand.turn()
    hand.submit(prompt(40), priority=priority)
    hand.loop._read_inbox()
    rows = hand.loop.scheduler.plan().rows
    assert [row.num_tokens for row in rows if row.request.id == 3] == [num_read]
    assert sum(row.num_drafts for row in rows) == 12 - num_read
