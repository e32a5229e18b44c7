"""Who waits for whom: no draft and no worse priority stands in the way of a request that could run."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from kit.fake_session import VOCAB, hashed, oracle
from kit.hand import Hand, prompt
from kit.proposers import always_right, shuffled

from hemiola.runtime.engine.request import Request
from hemiola.runtime.engine.scheduler import Scheduler
from hemiola.runtime.engine.step import Plan


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
        worse = any(r.params.priority > head.params.priority for r in running)
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
        drafting = [row.request.params.priority for row in plan.rows if row.num_drafts]
        if drafting and unread:
            assert max(drafting) <= min(r.params.priority for r in unread), "drafts before a better prompt"
            spare = self.config.max_step_tokens - (len(rows) - len(read))
            assert sum(row.num_drafts for row in plan.rows) <= spare // 2, "drafts have more than half"


def rank(request: Request) -> tuple[int, int]:
    return request.params.priority, request.age


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
