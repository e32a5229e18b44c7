"""Requests that start from the host's memory, while what they start from is on its way."""

import random
from collections.abc import Callable

import pytest
from kit.fake_session import FakeSession, FakeUnits, oracle, resolved
from kit.hand import Hand

from hemiola.runtime.schedule.request import Request

NEVER = 10**9  # polls
SIZES = {"num_pages": 17, "num_slots": 5, "max_rows": 3, "max_len": 64, "page_len": 8, "host_cache_bytes": 60}


def text(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


@pytest.fixture
def hand(make_hand: Callable[..., Hand]) -> Hand:
    """Whose host has the beginnings of text(0) to text(3), and the cache has nothing."""
    made = make_hand(session=FakeSession(resolved(prefix_cache=True, pipeline_depth=1, **SIZES)))
    for seed in range(4):
        made.submit(text(seed), max_tokens=2)
        made.run()
    prefix = made.loop.scheduler.prefix
    while (entry := prefix.evictor.page_victim()) is not None:
        prefix._evict(entry)
    units(made).lateness = lambda number: NEVER
    return made


def units(hand: Hand) -> FakeUnits:
    host = hand.loop.scheduler.prefix.host
    assert host is not None
    return host.mover


def begin(hand: Hand) -> Request:
    """A request for text(0), admitted while another one decodes."""
    hand.submit(text(7, 4), max_tokens=30)
    hand.turn()
    hand.turn()
    request = hand.requests[hand.submit(text(0), max_tokens=3) - 1]
    hand.turn()
    assert request.slot_id and request.load and request.hit_len == 32
    return request


def test_steps_wait_for_copies_to_rows_that_they_do_not_have(hand: Hand) -> None:
    request = begin(hand)
    other = hand.requests[-2]
    before = other.total_len
    for _ in range(6):
        hand.turn()
    assert other.total_len >= before + 5, "the other one stood still"
    assert request.in_flight == 0 and request.total_len == 40, "it ran before its pages were there"
    units(hand)._polls[request.load] = 0
    hand.run()
    assert hand.token_ids(request.id) == oracle(text(0), 3)
    assert hand.token_ids(other.id) == oracle(text(7, 4), 30)


def test_a_request_with_nobody_beside_it_waits_on_the_device_alone(hand: Hand) -> None:
    """The host has nothing to look for: its step is launched behind the copies at once."""
    number = hand.submit(text(0), max_tokens=3)
    hand.turn()
    assert hand.requests[-1].hit_len == 32 and hand.requests[-1].in_flight
    hand.run()
    assert hand.token_ids(number) == oracle(text(0), 3)


def test_a_device_that_has_work_waits_for_copies(hand: Hand) -> None:
    """Also where nothing else can be planned: copies may come before that work is done."""
    request = begin(hand)
    other = hand.requests[-2]
    while other.most_len < len(other.ids):
        hand.turn()
    assert other.in_flight and not request.in_flight
    hand.turn()
    assert other.finish_reason == "length" and not request.in_flight
    hand.turn()
    assert request.in_flight
    hand.run()


def test_several_that_wait_for_copies_run_when_nothing_else_can(hand: Hand) -> None:
    numbers = [hand.submit(text(seed), max_tokens=3) for seed in (0, 1)]
    hand.turn()
    assert [request.hit_len > 0 for request in hand.requests[-2:]] == [True, True]
    hand.run()
    assert [hand.token_ids(number) for number in numbers] == [oracle(text(seed), 3) for seed in (0, 1)]


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_pages_that_copies_still_write_to_are_given_to_others(hand: Hand, how: str) -> None:
    """They are free when steps are held behind the copies, and not before: the fake's copies come as late as
    they may, and would be found in others' pages."""
    request = begin(hand)
    mark, held = request.load, []
    hold = units(hand).hold
    units(hand).hold = lambda number: (held.append(number), hold(number))
    if how == "abort":
        hand.loop.abort(request.id)
        hand.turn()
    else:
        hand.preempt(request)
    assert held == [mark] and request.slot_id == 0 and request.load == 0
    more = [hand.submit(text(seed, 20), max_tokens=9) for seed in (11, 12)]
    hand.run()
    assert [hand.token_ids(number) for number in more] == [oracle(text(seed, 20), 9) for seed in (11, 12)]
    if how == "preempt":
        assert hand.token_ids(request.id) == oracle(text(0), 3)


def test_a_snapshot_whose_slot_its_request_took_is_lost_to_others(make_hand: Callable[..., Hand]) -> None:
    """There is no other slot: then the host keeps it, as it keeps whatever gives way."""
    sizes = SIZES | {"num_slots": 2, "max_rows": 1}
    hand = make_hand(session=FakeSession(resolved(prefix_cache=True, **sizes)))
    found = []
    for tail, num_tokens in (([], 2), ([1, 2, 3], 12), ([5] * 9, 1)):
        request_id = hand.submit(text(0) + tail, max_tokens=num_tokens)
        hand.run()
        assert hand.token_ids(request_id) == oracle(text(0) + tail, num_tokens)
        found.append(hand.requests[request_id - 1].metrics.cached_tokens)
    assert found == [0, 40, 40]
