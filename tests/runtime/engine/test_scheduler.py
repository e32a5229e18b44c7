"""The fake session checks every batch; here: who runs when, and that nothing of it changes a token."""

from collections.abc import Callable

import pytest
from kit.fake_session import oracle
from kit.hand import prompt

from hemiola.runtime.engine.step import Plan


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
    assert hand.loop.session.shapes == [(num,) for num in chunks]


def test_a_large_request_is_not_overtaken_for_ever(make_hand: Callable) -> None:
    hand = make_hand(num_pages=9)  # exactly one request of max_len
    hand.submit(prompt(8), max_tokens=30)
    large = hand.submit(prompt(50), max_tokens=10)
    small = [hand.submit(prompt(2, seed), max_tokens=5) for seed in range(5)]
    hand.run()
    for other in small:
        assert hand.last(other).metrics.first_scheduled >= hand.last(large).metrics.first_scheduled


def test_a_newcomer_is_not_let_in_to_be_thrown_out(make_hand: Callable) -> None:
    """The first needs one more page soon; the newcomer would take the last ones and lose them again."""
    hand = make_hand(num_pages=9)
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


def test_an_idle_plan_is_empty(make_hand: Callable) -> None:
    assert make_hand().loop.scheduler.plan() == Plan()
