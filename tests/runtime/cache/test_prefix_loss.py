"""What the prefix cache gives up: evictions, flushes, ages; and what its audit finds (see test_prefix.py)."""

import pytest
from kit.fake_session import POISON
from kit.house import House, P, known, serve_all, text

# Who is evicted.


def test_pages_behind_the_last_snapshot_go_first() -> None:
    """They save nothing. The other path is older, and would go first by age."""
    house = House(num_pages=13, donate=False)
    house.serve(text(2 * P + 1, 1))  # pages at 4 and 8, a snapshot at 8
    house.serve(text(4 * P + 1, 2))
    (tail,) = [entry for tokens, entry in house.prefix.contents() if entry.edge == 4 * P]
    house.prefix._drop_snapshot(tail)  # its four pages save nothing now
    house.audit()
    assert house.pages.num_free == 6
    house.serve(text(9 * P + 1, 3))
    assert house.prefix.statistics.evicted_pages == 4
    assert house.hit(text(2 * P + 1, 1)) == 2 * P


def test_a_snapshot_goes_with_its_page_and_not_later() -> None:
    house = House(num_pages=7, max_len=24)
    house.serve(text(3 * P + 1, 1))
    num_free = house.slots.num_free
    request = house.ask(text(5 * P + 1, 2), 3)
    house.turn()
    house.audit()  # finds a snapshot out of reach, and one without content
    assert house.prefix.statistics.stranded_snapshots == 1
    assert [edge for edge, _ in house.snapshots()] == [5 * P]
    assert house.slots.num_free == num_free - 1 and request.slot_id


def test_the_snapshot_that_saves_least_goes_first() -> None:
    """Of equal age and kind: the one close behind another."""
    house = House(num_slots=5, max_rows=1)
    house.serve(text(8 * P + 1, 1))
    house.serve([*text(8 * P, 1), *text(P + 1, 2)])
    house.serve(text(2 * P + 1, 3))
    assert [edge for edge, _ in house.snapshots()] == [8, 32, 36]
    for _, entry in house.prefix.contents():
        entry.used, entry.since = house.evictor.clock, 0
    house.serve(text(3 * P + 1, 4))
    assert [edge for edge, _ in house.snapshots()] == [8, 12, 32]


def test_a_snapshot_is_judged_by_what_hangs_below_it() -> None:
    house = House(hybrid=True)
    request = house.ask(text(P + 1), 3 * P)
    house.turn()
    (first,) = (entry for _, entry in house.prefix.contents() if entry.slot_id)
    assert first.group is not None and first.group.below == 0
    house.run()
    assert first.group.below == 1
    house.serve([*known(request, P), *text(P + 1, 1)])
    assert first.group.below == 2 and first.group.uses == 1


def test_a_snapshot_worth_less_than_all_others_is_not_taken() -> None:
    house = House(num_slots=3, max_rows=1)
    house.serve(text(8 * P + 1, 1))
    house.hit(text(8 * P + 1, 1))
    house.serve(text(P + 1, 2))
    assert house.snapshots() == [(32, "prompt")] and house.prefix.statistics.refused_snapshots == 1


def test_without_room_for_snapshots_there_are_none() -> None:
    house = House(num_slots=3, max_rows=2)
    requests = [house.ask(text(3 * P, seed), 8) for seed in (1, 2)]
    for _ in range(6):
        house.turn()
        assert house.snapshots() == []
    house.run()
    assert all(request.finish_reason for request in requests)


def test_a_request_that_needs_a_slot_displaces_a_snapshot() -> None:
    house = House(num_slots=3, max_rows=2)
    house.serve(text(3 * P, 1))
    assert len(house.snapshots()) == 1
    for seed in (2, 3):
        house.ask(text(3 * P, seed), 4)
    house.turn()
    assert len(house.scheduler.running) == 2 and house.snapshots() == []
    house.run()


def test_the_last_slot_is_taken_over_with_its_state() -> None:
    """The one snapshot has the one slot: otherwise the request would wait for ever or lose its hit."""
    house = House(num_slots=2, max_rows=1, chunk_len=P, donate=True)
    prompt = text(3 * P + 1)
    house.serve(prompt)
    assert house.snapshots() == [(12, "decode")] or house.snapshots() == [(12, "prompt")]
    request = house.serve(prompt)
    assert request.hit_len == 3 * P and not house.session.copies


def test_a_snapshot_is_not_given_away_in_the_step_that_restores_it() -> None:
    house = House(num_slots=4, max_rows=3)
    house.serve(text(3 * P + 1, 1))
    assert house.hit(text(3 * P + 1, 1)) == 3 * P
    first, second, third = (house.ask(text(3 * P + 1, seed), 2) for seed in (1, 2, 3))
    house.turn()
    assert first.hit_len and house.session.copies and second.slot_id and not third.slot_id
    house.turn()
    assert third.slot_id, "a step later the snapshot must give way"
    house.run()


# Flush.


@pytest.mark.parametrize("steps", range(8))
def test_flush_while_requests_run(steps: int) -> None:
    house = House(budget=7)
    prompts = [[*text(2 * P), *text(P + 3, seed)] for seed in (1, 2)]
    serve_all(house, prompts)
    requests = [house.ask(prompt, 9) for prompt in prompts]
    for _ in range(steps):
        house.turn()
    house.prefix.flush()
    house.audit()
    assert house.snapshots() == [] and list(house.prefix.contents()) == []
    running = [request for request in requests if request.slot_id]
    for request in running:
        assert house.prefix.take(request.slot_id, 0, 3 * P) is None, "a slot for what nobody will find"
    house.run()
    assert all(request.finish_reason for request in requests)
    if len(running) == 2:
        assert list(house.prefix.contents()) == [], "published what was computed before the flush"
    assert house.hit(text(3 * P, 7)) == 0 and house.hit(text(3 * P, 7)) == 2 * P


def test_an_idle_cache_gives_everything_back() -> None:
    house = House()
    serve_all(house, [text(3 * P, seed) for seed in range(4)])
    house.prefix.flush()
    assert house.pages.num_free == house.pages.num_pages - 1
    assert house.slots.num_free == house.slots.num_slots - 1
    assert (house.session.pages == POISON).all() and not any(house.session.states)


def test_tenants_that_left_leave_nothing() -> None:
    house = House(num_pages=7, max_len=24)
    for number in range(20):
        house.serve(text(2 * P), tenant=str(number))
    assert len(house.prefix._tree.roots) <= 6


# Counts and audits.


def test_statistics() -> None:
    house = House()
    serve_all(house, [text(3 * P)] * 3)
    statistics = house.prefix.statistics
    assert (statistics.num_queries, statistics.num_hits) == (3, 2)
    assert (statistics.query_tokens, statistics.hit_tokens) == (9 * P, 4 * P)
    assert statistics.num_snapshots == 2 and statistics.evicted_pages == 0


def wrong_tokens(house: House) -> None:
    entry = next(entry for _, entry in house.prefix.contents())
    entry.tokens = bytes(len(entry.tokens))


def lost_page(house: House) -> None:
    house.pages._cached[next(entry for _, entry in house.prefix.contents()).page_id] = False


def lost_snapshot(house: House) -> None:
    next(entry for _, entry in house.prefix.contents() if entry.slot_id).slot_id = 0


def moved_snapshot(house: House) -> None:
    house.slots.edge[next(entry for _, entry in house.prefix.contents() if entry.slot_id).slot_id] = 2


def orphan(house: House) -> None:
    first = next(entry for _, entry in house.prefix.contents() if entry.edge == P)
    del house.prefix._tree.entries[first.key]
    house.pages.drop(first.page_id)


def forgotten_leaf(house: House) -> None:
    for _, entry in house.prefix.contents():
        house.evictor.busy(entry)


def other_page(house: House) -> None:
    house.scheduler.running[0].slot_id, lease = 0, house.prefix._leases[house.scheduler.running[0].slot_id]
    lease.path[0], lease.path[1] = lease.path[1], lease.path[0]


def wrong_above(house: House) -> None:
    entry = next(entry for _, entry in house.prefix.contents() if entry.slot_id)
    entry.above = entry.parent


def lost_take(house: House) -> None:
    house.slots.acquire()


HARMS = [
    wrong_tokens, lost_page, lost_snapshot, moved_snapshot, orphan, forgotten_leaf, other_page, wrong_above,
    lost_take,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_the_audit_finds(harm: object) -> None:
    house = House()
    house.serve(text(3 * P + 1))
    house.ask([*text(2 * P), *text(2 * P, 1)], 5)
    house.turn()
    house.audit()
    harm(house)
    with pytest.raises(AssertionError):
        house.prefix.audit()


# Ages: time passes with every request that is admitted.


def test_a_snapshot_ages_while_others_are_served() -> None:
    """The older one saves twice as much, and goes all the same."""
    house = House(num_slots=4, max_rows=1)
    house.serve(text(4 * P + 1, 1))
    for seed in range(40):
        house.serve(text(1, seed))
    house.serve(text(2 * P + 1, 2))
    house.serve(text(3 * P + 1, 3))
    assert [edge for edge, _ in house.snapshots()] == [2 * P, 3 * P]


def test_a_page_is_as_old_as_the_last_request_that_held_it() -> None:
    house = House(hybrid=False, num_pages=4, max_len=12)
    house.serve(text(P, 1), 2)
    assert house.hit(text(P + 1, 1)) == P
    house.serve(text(P, 2), 2)
    house.serve(text(P, 3), 2)
    assert house.hit(text(P + 1, 2)) == P, "the younger page went"


def test_a_page_is_as_old_as_the_one_that_was_behind_it() -> None:
    house = House(hybrid=False)
    for seed in range(5):
        house.serve(text(2 * P + 1, seed))
    leaves = {entry.used: entry for _, entry in house.prefix.contents() if not entry.children}
    assert sorted(leaves) == [1, 2, 3, 4, 5]
    house.prefix._evict(leaves[4])
    assert leaves[4].parent.used == 4


def test_a_snapshot_whose_slot_is_taken_over_has_been_used() -> None:
    """There is no other slot. What such snapshots are worth is learned from it too."""
    house = House(num_slots=2, max_rows=1, donate=True, chunk_len=P)
    house.serve(text(P, 1), 2)
    ((_, entry),) = house.prefix.contents()
    group = entry.group
    assert entry.slot_id and not house.evictor.reuse._uses
    assert house.hit([*text(P, 1), 5]) == P
    assert sum(house.evictor.reuse._uses[group]) == 1
