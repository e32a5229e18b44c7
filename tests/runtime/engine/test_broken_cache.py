"""What a request leaves in the prefix cache if a step of it computed NaN, or if nobody looked for NaN.

The device recovers: a fault strikes single steps, and only the cache could make it last.
"""

import math
from collections.abc import Callable

import pytest
from kit.engine_hand import EngineHand, Wanted
from kit.fake_session import FakeSession, hashed, oracle, resolved
from kit.faulty import FaultySession
from kit.hand import Hand, prompt

from hemiola.plugins.rows import live_rows
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.program import Batch

P = 8  # tokens in a page
TEXT = prompt(5 * P + 3)
DEPTHS = [0, 1, 2]


@pytest.fixture
def faulty(make_hand: Callable[..., Hand]) -> Callable[..., Hand]:
    """A hand whose steps have a page of prompt tokens; the first step is broken, if nothing else is said."""

    def make(depth: int = 0, spoils: str = "all", value: float = math.nan, **sizes: int) -> Hand:
        faults = sizes.pop("faults", {0})
        hybrid = sizes.pop("hybrid", True)
        small = {"max_step_tokens": P, "prefix_cache": True, "pipeline_depth": depth, "snapshot_interval": P}
        return make_hand(session=FaultySession(resolved(**small | sizes), faults, hybrid, value, spoils))

    return make


def cached(hand: Hand) -> list[list[int]]:
    return [list(tokens) for tokens, _ in hand.loop.scheduler.prefix.contents()]


def dirty(hand: Hand) -> list[int]:
    """Edges of what is cached and spoilt."""
    session = hand.loop.storage
    found = [entry for _, entry in hand.loop.scheduler.prefix.contents()]
    return [e.edge for e in found if session.dirty_pages[e.page_id].any() or e.slot_id in session.dirty_slots]


def demand_answer(hand: Hand, text: list[int], hit: int | None = None) -> None:
    """The oracle's, and no NaN, on a device that has recovered."""
    hand.loop.storage.faults.clear()
    request_id = hand.submit(text, max_tokens=9)
    hand.run()
    assert hand.last(request_id).finish_reason == "length", hand.last(request_id).error
    assert hand.token_ids(request_id) == oracle(text, 9)
    assert hit is None or hand.requests[-1].hit_len == hit
    assert dirty(hand) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("spoils", "hybrid"), [("all", True), ("states", True), ("all", False)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_failed_requests_nan_stays_cached(
    faulty: Callable[..., Hand], depth: int, spoils: str, hybrid: bool, value: float
) -> None:
    hand = faulty(depth, spoils, value, hybrid=hybrid)
    failed = hand.submit(TEXT, max_tokens=9)
    hand.run()
    assert hand.last(failed).finish_reason == "error"
    assert cached(hand) == []
    demand_answer(hand, TEXT, hit=0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nan_while_decoding_stays_cached(faulty: Callable[..., Hand], depth: int) -> None:
    hand = faulty(depth, faults={12})
    failed = hand.submit(TEXT, max_tokens=20)
    hand.run()
    assert hand.last(failed).finish_reason == "error" and cached(hand) == []
    demand_answer(hand, TEXT, hit=0)


@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("hybrid", [True, False])
def test_a_prompt_whose_last_step_fills_no_page_is_forgotten(
    faulty: Callable[..., Hand], hybrid: bool, rest: int
) -> None:
    """That step only says that what was published before it is no NaN, and the request ends with it."""
    hand, text = faulty(faults=set(), hybrid=hybrid), prompt(P + rest)
    hand.submit(text, max_tokens=1)
    hand.run()
    assert cached(hand) == [text[:P]]
    demand_answer(hand, text, hit=P)


@pytest.mark.parametrize("what", ["page", "snapshot"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_hit_that_spoilt_since_fails_every_request_that_begins_there(
    faulty: Callable[..., Hand], depth: int, what: str
) -> None:
    """And what is cached behind it goes, too, and what the host keeps of it."""
    hand = faulty(depth, faults=set(), host_cache_bytes=60)
    demand_answer(hand, TEXT)
    demand_answer(hand, TEXT[: 4 * P] + prompt(P, 5))
    session, prefix = hand.loop.storage, hand.loop.scheduler.prefix
    for _, entry in prefix.contents():
        prefix._keep(entry)
        if what == "page" and entry.edge == P:
            session.dirty_pages[entry.page_id] = True
        if what == "snapshot" and entry.slot_id:
            session.dirty_slots.add(entry.slot_id)
    failed = hand.submit(TEXT, max_tokens=9)
    hand.run()
    assert hand.last(failed).finish_reason == "error" and hand.requests[-1].hit_len > 0
    assert cached(hand) == [] == list(prefix.host.contents())
    demand_answer(hand, TEXT, hit=0)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("lateness", [0, 1])
def test_a_copy_on_the_host_that_spoilt_fails_all_who_begin_from_it_at_once(
    faulty: Callable[..., Hand], lateness: int, depth: int
) -> None:
    """One fails; the others start anew, also those whose copy is still under way."""
    hand = faulty(depth, faults=set(), host_cache_bytes=60, max_step_tokens=64)
    demand_answer(hand, TEXT)
    prefix, session = hand.loop.scheduler.prefix, hand.loop.storage
    while (entry := prefix.evictor.page_victim()) is not None:
        prefix._evict(entry)

    def spoil(batch: Batch) -> None:
        for row, table in zip(live_rows(batch.rows, session.config.chunk_len), batch.page_table, strict=True):
            if row.committed == 5 * P:
                session.dirty_pages[table[:5]] = True

    session.before_run, prefix.host.mover.lateness = spoil, lambda number: lateness * number
    ids = [hand.submit(TEXT, max_tokens=9) for _ in range(3)]
    hand.run()
    assert [hand.requests[number - 1].metrics.cached_tokens for number in ids] == [5 * P] * 3
    assert sorted(hand.last(number).finish_reason for number in ids) == ["error", "length", "length"]
    assert dirty(hand) == [] == list(prefix.host.contents())


def test_a_text_stays_cached_of_which_a_score_is_nan(make_hand: Callable[..., Hand]) -> None:
    """Of a token within the prompt, at which nobody else looks."""

    def next_token(context: list[int]) -> int | None:
        return None if list(context) == TEXT[: 2 * P + 3] else hashed(context)

    hand = make_hand(session=FakeSession(resolved(prefix_cache=True, max_step_tokens=P), next_token))
    hand.submit(TEXT, max_tokens=1)
    hand.run()
    assert cached(hand)
    scored = hand.submit(TEXT, max_tokens=1, prompt_logprobs=0)
    hand.run()
    assert "NaN" in str(hand.last(scored).error) and cached(hand) == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_who_began_from_withdrawn_pages_publishes_beneath_them(
    faulty: Callable[..., Hand], depth: int
) -> None:
    """It begins while the other is at its prompt, and is longer. It starts anew, and is right."""
    hand = faulty(depth, max_len=96)
    first = hand.submit(TEXT, max_tokens=9)
    while hand.requests[0].committed_len < 3 * P:
        hand.turn()
    second = hand.submit(TEXT + prompt(2 * P, 3), max_tokens=9, priority=0)
    hand.run()
    assert hand.last(first).finish_reason == "error"
    assert dirty(hand) == []
    assert hand.token_ids(second) == oracle(TEXT + prompt(2 * P, 3), 9), hand.last(second).error
    assert hand.last(second).metrics.num_preemptions == 1
    demand_answer(hand, TEXT)
    demand_answer(hand, TEXT + prompt(2 * P, 3))


@pytest.mark.parametrize("num_turns", range(9))
@pytest.mark.parametrize("strike", [0, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cancelled_request_leaves_what_nobody_looked_at(
    faulty: Callable[..., Hand], depth: int, strike: int, num_turns: int
) -> None:
    """Page and chunk are equal: its slot stands at an edge and would become a snapshot."""
    hand = faulty(depth, faults={strike}, chunk_len=P)
    request_id = hand.submit(TEXT, max_tokens=9)
    for _ in range(num_turns):
        hand.turn()
    hand.loop.abort(request_id)
    hand.run()
    assert dirty(hand) == []
    demand_answer(hand, TEXT)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_cancelled_while_it_waits_leaves_what_nobody_looked_at(
    faulty: Callable[..., Hand], depth: int
) -> None:
    hand = faulty(depth)
    request_id = hand.submit(TEXT, max_tokens=9)
    while hand.requests[0].committed_len < 2 * P:
        hand.turn()
    hand.preempt(hand.requests[0])
    scheduler = hand.loop.scheduler
    plan, scheduler.plan = scheduler.plan, Plan  # it is not admitted again yet
    while hand.requests[0].slot_id:
        hand.turn()
    hand.audit()
    scheduler.plan = plan
    assert cached(hand), "it begins from them again"
    hand.loop.abort(request_id)
    hand.loop._read_inbox()
    assert cached(hand) == []
    demand_answer(hand, TEXT, hit=0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_preempted_request_loses_its_prompts_pages_or_keeps_its_nan(
    faulty: Callable[..., Hand], depth: int
) -> None:
    for faults in (set(), {0}):
        hand = faulty(depth, faults=faults)
        request_id = hand.submit(TEXT, max_tokens=9)
        while hand.requests[0].committed_len < 3 * P:
            hand.turn()
        hand.preempt(hand.requests[0])
        hand.run()
        assert hand.requests[0].metrics.num_preemptions == 1 and hand.requests[0].hit_len >= 2 * P
        assert hand.requests[0].metrics.cached_tokens == 0, "it reused its own work only"
        assert hand.last(request_id).finish_reason == ("error" if faults else "length")
        assert dirty(hand) == [] and bool(cached(hand)) == (not faults)
        demand_answer(hand, TEXT)


def test_a_cancel_takes_pages_from_those_who_still_compute_with_them(faulty: Callable[..., Hand]) -> None:
    """Who began from a cancelled request's pages proves them."""
    hand = faulty(faults=set(), max_step_tokens=2 * P)  # a chunk ends at a snapshot: there is room for two
    first = hand.submit(TEXT, max_tokens=9)
    while hand.requests[0].committed_len < 2 * P:
        hand.turn()
    second = hand.submit(TEXT, max_tokens=9)
    while not hand.requests[1].slot_id:
        hand.turn()
    assert hand.requests[0].total_len == hand.requests[1].total_len == len(TEXT), "nobody has proven anything"
    hand.loop.abort(first)
    hand.run()
    assert hand.requests[1].hit_len and hand.last(second).finish_reason == "length"
    assert TEXT[: 5 * P] in cached(hand)
    demand_answer(hand, TEXT, hit=5 * P)


def test_a_cancelled_requests_spoilt_state_stays_on_a_proven_page(faulty: Callable[..., Hand]) -> None:
    """Another has proven the pages; the snapshot at the junction is the cancelled one's."""
    hand = faulty(faults=set(), spoils="states", snapshot_interval=0)
    hand.submit(TEXT, max_tokens=1)
    hand.run()
    session = hand.loop.storage
    session.faults = {len(session.shapes)}
    branch = hand.submit(TEXT[: 2 * P] + prompt(2 * P, 5), max_tokens=9)
    while hand.requests[1].committed_len < 2 * P:
        hand.turn()
    assert dirty(hand) == [2 * P]
    hand.loop.abort(branch)
    hand.run()
    assert dirty(hand) == []
    demand_answer(hand, TEXT[: 2 * P] + prompt(2 * P, 6))


def test_a_snapshot_in_the_slot_of_an_earlier_one_is_taken_for_proven(faulty: Callable[..., Hand]) -> None:
    """By the answer of who had stored the earlier one of this page. The spoilt one is another's."""
    hand = faulty(faults=set(), max_step_tokens=P + 4, chunk_len=P)
    ids = [hand.submit(TEXT, max_tokens=9) for _ in range(2)]
    hand.turn()
    prefix, session = hand.loop.scheduler.prefix, hand.loop.storage
    ((_, entry),) = prefix.contents()
    slot_id = entry.slot_id
    prefix._drop_snapshot(entry)
    assert prefix.slots.acquire() == slot_id
    prefix._attach(prefix._leases[hand.requests[1].slot_id], entry, slot_id)
    session.states[slot_id] = TEXT[:P]
    session.dirty_slots.add(slot_id)
    while hand.requests[0].total_len == len(TEXT):
        hand.turn()
    hand.loop.abort(ids[1])
    hand.run()
    assert dirty(hand) == []
    demand_answer(hand, TEXT)


def test_a_cancel_takes_a_snapshot_from_which_another_began_and_has_answered(
    faulty: Callable[..., Hand],
) -> None:
    hand = faulty(faults=set())
    first = hand.submit(TEXT, max_tokens=9)
    while hand.requests[0].committed_len < 2 * P:
        hand.turn()
    second = hand.submit(TEXT[: 2 * P + 1], max_tokens=1, priority=-1)
    while not hand.ended(second):
        hand.turn()
    assert hand.requests[0].total_len == len(TEXT) and hand.requests[1].hit_len == 2 * P
    hand.loop.abort(first)
    hand.run()
    demand_answer(hand, TEXT[: 2 * P] + prompt(3, 9), hit=2 * P)


def test_a_sound_request_that_is_cancelled_later_leaves_nothing(faulty: Callable[..., Hand]) -> None:
    hand = faulty(faults=set())
    request_id = hand.submit(TEXT, max_tokens=9)
    while hand.requests[0].total_len < len(TEXT) + 2:
        hand.turn()
    hand.loop.abort(request_id)
    hand.run()
    demand_answer(hand, TEXT, hit=5 * P)


@pytest.mark.parametrize("salt", ["", "a"])
def test_a_failure_withdraws_what_others_have(faulty: Callable[..., Hand], salt: str) -> None:
    """Another text's pages, and another tenant's of the same text, stay."""
    hand = faulty(faults={6})
    kept = hand.submit(TEXT, max_tokens=1, cache_salt="b")
    hand.run()
    text = TEXT if salt else prompt(5 * P + 3, 4)
    failed = hand.submit(text, max_tokens=9, cache_salt=salt)
    hand.run()
    assert hand.last(kept).finish_reason == "length" and hand.last(failed).finish_reason == "error"
    assert sorted(map(len, cached(hand))) == [P, 2 * P, 3 * P, 4 * P, 5 * P]


@pytest.mark.parametrize("what", ["page", "snapshot"])
@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_a_real_engines_nan_stays_cached(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, kind: str, what: str
) -> None:
    story = wanted.story("qwen3_5")
    hand = engine_hands("qwen3_5", kind, {"num_drafts": 3} if kind == "mtp" else None)
    length = 3 * hand.config.page_len + 2
    first = hand.submit(story[:length], max_tokens=3)
    hand.run()
    entries = [entry for _, entry in hand.loop.scheduler.prefix.contents()]
    if what == "page":
        hand.storage.free_pages([entry.page_id for entry in entries])  # which fills them with NaN
    else:
        hand.storage.free_slots([entry.slot_id for entry in entries if entry.slot_id])
    failed = hand.submit(story[:length], max_tokens=3)
    hand.run()
    assert hand.last(failed).finish_reason == "error" and hand.requests[-1].hit_len
    again = hand.submit(story[:length], max_tokens=3)
    hand.run()
    assert hand.requests[-1].hit_len == 0
    assert hand.token_ids(again) == hand.token_ids(first) == story[length : length + 3]


def test_a_request_that_ends_in_the_step_in_which_its_prefix_is_not_trusted_waits_for_ever(
    faulty: Callable[..., Hand],
) -> None:
    """Its last piece has left; it may not be preempted then."""
    hand = faulty(faults=set(), max_step_tokens=4 * P, max_len=96)
    first = hand.submit(TEXT, max_tokens=20)
    while hand.requests[0].total_len < len(TEXT) + 5:
        hand.turn()
        if hand.requests[0].total_len == len(TEXT) + 1:
            second = hand.submit(TEXT[: 2 * P] + prompt(P, 2), max_tokens=30)
    other, scheduler = hand.requests[1], hand.loop.scheduler
    page = int(scheduler.prefix.pages.table[other.slot_id, 2])
    hand.loop.storage.dirty_pages[page] = True
    end = hand.loop.outbox.drain

    def drain(plan: Plan) -> list:
        if hand.requests[0].finish_reason is None:
            hand.requests[0].stop_at(hand.requests[0].total_len)  # as a stop string does
        return end(plan)

    hand.loop.outbox.drain = drain
    hand.run()
    assert hand.last(first).finish_reason == "stop" and hand.last(second).finish_reason == "error"
    assert scheduler.waiting == scheduler.running == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_step_proves_a_page_for_which_its_own_was_swapped_while_it_was_under_way(
    faulty: Callable[..., Hand], depth: int
) -> None:
    """It has read its own, which was sound; the other one's holds NaN."""
    hand = faulty(depth)
    struck = hand.submit(TEXT, max_tokens=9)
    hand.turn()
    other = hand.submit(TEXT[: P + 3], max_tokens=1, prompt_logprobs=0, priority=-1)
    while not hand.ended(other):
        hand.turn()
    assert hand.last(other).finish_reason == ("length" if depth else "error") and not hand.ended(struck)
    hand.loop.abort(struck)
    hand.run()
    assert dirty(hand) == []
    demand_answer(hand, TEXT, hit=0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_scores_of_a_prompt_are_lost_if_its_prefix_is_not_trusted_when_they_leave(
    make_hand: Callable[..., Hand], depth: int
) -> None:
    """Its first token comes in the step in which another of its first page computes NaN."""
    bad, length = [*TEXT[:P], 1, 2], 2 * P + 3

    def next_token(context: list[int]) -> int | None:
        return None if list(context) == bad else hashed(context)

    sizes = {"max_step_tokens": 64, "pipeline_depth": depth, "prefix_cache": True}
    hand = make_hand(session=FakeSession(resolved(**sizes), next_token))
    hand.submit(TEXT[: P + 1], max_tokens=1)
    hand.run()
    scored = hand.submit(TEXT[:length], max_tokens=9, prompt_logprobs=0)
    failed = hand.submit(bad, max_tokens=3)
    hand.run()
    assert hand.last(failed).finish_reason == "error" and hand.token_ids(scored) == oracle(TEXT[:length], 9)
    assert hand.last(scored).metrics.num_preemptions == 1
    (told,) = [piece.prompt_logprobs for piece in hand.pieces[scored] if piece.prompt_logprobs is not None]
    assert [score and score.token_id for score in told] == [None, *TEXT[1:length]]


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
def test_who_sends_what_computes_nan_keeps_those_of_its_first_page_from_ending(
    make_hand: Callable[..., Hand], depth: int, hybrid: bool
) -> None:
    """Each of its requests made the others start anew. Now that happens to a request once at most."""
    text = prompt(20 * P)

    def next_token(context: list[int]) -> int | None:
        return None if len(context) == P + 1 and context[-1] != text[P] else hashed(context)

    sizes = {"max_step_tokens": 4 * P, "max_len": 256, "pipeline_depth": depth, "snapshot_interval": P}
    hand = make_hand(
        session=FakeSession(resolved(**sizes, max_rows=3, prefix_cache=True), next_token, hybrid)
    )
    good, num_turns = hand.submit(text, max_tokens=9, priority=1), 0
    while not hand.ended(good) and num_turns < 100:
        num_turns += 1
        if len(hand.loop.scheduler.running) + len(hand.loop.scheduler.waiting) < 3:
            hand.submit([*text[:P], (text[P] + num_turns) % 97], max_tokens=2)
        hand.turn()
    assert hand.ended(good), "it never ends"
    hand.run()
    assert hand.token_ids(good) == oracle(text, 9)
    assert hand.last(good).metrics.num_preemptions == (0 if hybrid else 1)
    assert {hand.last(n).finish_reason for n in range(2, len(hand.requests))} == {"error"}
