"""Steps under way whose outcome the host does not know, and who goes before whom."""

from collections.abc import Callable

import pytest
from kit.fake_session import VOCAB, FakeSession, hashed, oracle, resolved
from kit.hand import prompt
from kit.proposers import Scripted, always_right, shuffled

DEPTHS = [0, 1, 2]


@pytest.mark.parametrize(("num_drafts", "steps"), [(0, 25), (3, 9)])
def test_the_depth_changes_no_token_and_no_step(make_hand: Callable, num_drafts: int, steps: int) -> None:
    """With right drafts and room for all."""
    for depth in DEPTHS:
        proposer = always_right(hashed) if num_drafts else None
        hand = make_hand(proposer=proposer, num_drafts=num_drafts, pipeline_depth=depth, prefix_cache=True)
        ids = [hand.submit(prompt(n), max_tokens=24) for n in (3, 9, 17, 30)]
        hand.run()
        assert [hand.token_ids(i) for i in ids] == [oracle(prompt(n), 24) for n in (3, 9, 17, 30)]
        assert hand.loop.counters.num_steps == steps


@pytest.mark.parametrize("depth", DEPTHS)
def test_so_many_steps_are_under_way(make_hand: Callable, depth: int) -> None:
    hand = make_hand(pipeline_depth=depth)
    hand.submit(prompt(5), max_tokens=30)
    for turn in range(1, 12):
        hand.turn()
        assert len(hand.loop._flights) == min(turn, depth)
        assert hand.loop.counters.num_steps == max(turn - depth, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_freed_while_a_step_may_write_it(make_hand: Callable, depth: int) -> None:
    """An aborted request's user hears at once; its slot and pages come back when its last step has landed."""
    hand = make_hand(pipeline_depth=depth, max_rows=2)
    doomed = hand.submit(prompt(9), max_tokens=30)
    for _ in range(5):
        hand.turn()
    request = hand.requests[0]
    assert request.in_flight == depth
    hand.loop.abort(doomed)
    hand.loop._read_inbox()
    assert hand.last(doomed).finish_reason == "cancelled" and request.slot_id
    slots = hand.loop.scheduler.slots
    while request.in_flight:
        assert slots.num_free == slots.num_slots - 2
        hand.turn()
    assert request.slot_id == 0 and slots.num_free == slots.num_slots - 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_nan_fails_its_request_only_and_is_not_cached(
    make_hand: Callable, num_drafts: int, depth: int
) -> None:
    """Behind a text of every length: so at every line of a window, all of whose drafts are right."""
    for length in range(9, 18):
        bad = prompt(9, 1) + oracle(prompt(9, 1), 20)

        def next_token(context: list[int], spoilt: list[int] = bad[:length]) -> int | None:
            return None if list(context) == spoilt else hashed(context)

        sizes = {"num_drafts": num_drafts, "pipeline_depth": depth, "prefix_cache": True}
        session = FakeSession(resolved(**sizes, max_step_tokens=64), next_token)
        hand = make_hand(session=session, proposer=always_right(hashed) if num_drafts else None)
        failed, good = hand.submit(bad[:9], max_tokens=20), hand.submit(prompt(9, 2), max_tokens=20)
        hand.run()
        assert hand.last(failed).finish_reason == "error"
        assert hand.last(failed).error == f"the engine computed NaN for the token at position {length}"
        assert hand.token_ids(failed) == bad[9:length]
        assert hand.token_ids(good) == oracle(prompt(9, 2), 20)
        cached = [tokens for tokens, _ in hand.loop.scheduler.prefix.contents()]
        assert all(list(tokens) != bad[: len(tokens)] or len(tokens) < length for tokens in cached)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nan_behind_a_rejected_draft_or_an_end_fails_nobody(make_hand: Callable, depth: int) -> None:
    """The plain run does not get there."""
    text = prompt(9, 1) + oracle(prompt(9, 1), 20)

    def next_token(context: list[int]) -> int | None:
        known = list(context) == text[: len(context)] if len(context) < 22 else False
        return hashed(context) if len(context) < 9 or known else None

    wrong = Scripted(lambda request, room: [(text[request.total_len] + 1) % VOCAB, 5, 6][:room])
    for proposer in (wrong, always_right(hashed)):
        session = FakeSession(resolved(num_drafts=3, pipeline_depth=depth), next_token)
        hand = make_hand(session=session, proposer=proposer)
        asked = hand.submit(text[:9], max_tokens=13)
        hand.run()
        assert hand.last(asked).finish_reason == "length", hand.last(asked)
        assert hand.token_ids(asked) == text[9:22]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_better_priority_runs_first(make_hand: Callable, depth: int) -> None:
    hand = make_hand(max_rows=1, pipeline_depth=depth)
    runs = hand.submit(prompt(3), max_tokens=4)
    hand.turn()
    late = [hand.submit(prompt(4, n), max_tokens=4, priority=p) for n, p in enumerate((2, 0, 1, 0))]
    hand.run()
    order = sorted([runs, *late], key=lambda i: hand.requests[i - 1].metrics.first_scheduled)
    assert order == [runs, late[1], late[3], late[2], late[0]]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_better_priority_takes_the_place_of_a_worse_one(make_hand: Callable, depth: int) -> None:
    """Which resumes from a snapshot of its own text, and loses nothing."""
    hand = make_hand(max_rows=1, pipeline_depth=depth, prefix_cache=True)
    worse = hand.submit(prompt(20), max_tokens=30, priority=5)
    for _ in range(20):
        hand.turn()
    better = hand.submit(prompt(6), max_tokens=5)
    for _ in range(12):
        hand.turn()
    assert hand.pieces[better] and hand.last(better).finish_reason == "length"
    assert hand.requests[0].metrics.num_preemptions == 1
    hand.run()
    assert hand.requests[0].hit_len >= 24, "it began at a page edge of its output"
    assert hand.token_ids(worse) == oracle(prompt(20), 30)
    assert hand.token_ids(better) == oracle(prompt(6), 5)


def test_an_equal_priority_takes_nobodys_place(make_hand: Callable) -> None:
    hand = make_hand(max_rows=1)
    hand.submit(prompt(5), max_tokens=20)
    hand.turn()
    hand.submit(prompt(6), max_tokens=5)
    hand.run()
    assert hand.loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_drafts", [0, 3, 9])
def test_a_second_turn_begins_at_the_last_page_of_the_first(
    make_hand: Callable, depth: int, num_drafts: int
) -> None:
    """Windows of up to 10 tokens pass edges (4) and pages (8) at any place."""
    proposer = shuffled(7, hashed, VOCAB) if num_drafts else None
    hand = make_hand(
        proposer=proposer, num_drafts=num_drafts, prefix_cache=True, pipeline_depth=depth, num_slots=30
    )
    for length in range(1, 30):
        first = hand.submit(prompt(length), max_tokens=25)
        hand.run()
        text = prompt(length) + hand.token_ids(first)
        second = hand.submit([*text, 1, 2], max_tokens=4)
        hand.run()
        assert hand.token_ids(second) == oracle([*text, 1, 2], 4)
        cached = hand.requests[-1].metrics.cached_tokens
        assert cached == hand.kept_edge(first), f"prompt of {length}"
        if num_drafts < 8 or depth < 2:  # windows wider than a page outrun a host that lags
            assert cached == hand.final_len[first] // 8 * 8, f"prompt of {length}"


def test_a_request_may_draft_less_or_nothing(make_hand: Callable) -> None:
    hand = make_hand(proposer=always_right(hashed), num_drafts=5, max_rows=3)
    ids = [hand.submit(prompt(5, n), max_tokens=30, num_drafts=k) for n, k in enumerate((None, 2, 0))]
    hand.run()
    assert [len(hand.last(i).metrics.drafted) for i in ids] == [5, 2, 0]
    assert [hand.token_ids(i) for i in ids] == [oracle(prompt(5, n), 30) for n in range(3)]
