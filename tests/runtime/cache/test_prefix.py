"""Every hit is checked against all that is cached, and the content of all that is read (kit/hand.py)."""

import numpy as np
import pytest
from kit.house import House, P, known, serve_all, text

from hemiola.runtime.cache import tree
from hemiola.runtime.cache.edges import reusable_len

# How long a hit is.


@pytest.mark.parametrize("length", range(1, 5 * P + 3))
def test_a_prefix_of_a_cached_prompt_finds_no_state_of_a_longer_one(length: int) -> None:
    """Hybrid: there are snapshots at 16 (the last reusable edge), and none at 4, 8 and 12."""
    house = House()
    prompt = text(5 * P + 2)
    house.serve(prompt[: 5 * P])
    assert house.snapshots() == [(16, "prompt")]
    assert house.hit(prompt[:length]) == (16 if length > 16 else 0)


@pytest.mark.parametrize("length", range(1, 5 * P + 3))
def test_without_recurrences_every_prefix_finds_its_pages(length: int) -> None:
    house = House(hybrid=False)
    prompt = text(5 * P + 2)
    house.serve(prompt)
    assert house.hit(prompt[:length]) == reusable_len(length, P)


# Whose it is.


def test_tenants_and_engines_are_apart() -> None:
    prompt = text(3 * P)
    house = House()
    assert house.hit(prompt, tenant="a") == 0
    assert house.hit(prompt, tenant="b") == 0
    assert house.hit(prompt) == 0
    assert house.hit(prompt, tenant="a") == house.hit(prompt, tenant="b") == house.hit(prompt) == 2 * P
    keys = {House(identity=identity).prefix.chain(np.zeros(8, np.int32), tenant).key(1)
            for identity, tenant in [("", ""), ("x", ""), ("", "x"), ("x', '", ""), ("x", "x")]}  # fmt: skip
    assert len(keys) == 5


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_colliding_hash_serves_no_other_prefix(monkeypatch: pytest.MonkeyPatch, hybrid: bool) -> None:
    """The house compares contents; with one hash for all, only the very first page can be found."""
    monkeypatch.setattr(tree, "digest", lambda parent, tokens: bytes(16))
    house = House(hybrid=hybrid)
    house.serve(text(3 * P), tenant="a")
    assert house.hit(text(3 * P), tenant="b") == 0
    assert house.hit(text(3 * P, 1), tenant="a") == 0
    assert house.hit(text(3 * P), tenant="a") == (0 if hybrid else P)


def test_a_colliding_hash_is_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second page has the tokens of the first, and the hash, but not what is before it."""
    monkeypatch.setattr(tree, "digest", lambda parent, tokens: bytes(16))
    house = House(hybrid=False)
    prompt = text(P) * 3
    house.ask(prompt, 5)
    house.turn()
    house.audit()
    assert [entry.edge for _, entry in house.prefix.contents()] == [P]
    assert house.hit(prompt) == P


def test_a_colliding_salt_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = tree.digest
    monkeypatch.setattr(tree, "digest", lambda parent, tokens: digest(parent, tokens if parent else b""))
    house = House()
    house.serve(text(3 * P), tenant="a")
    request = house.ask(text(3 * P), 5, tenant="b")
    house.turn()
    house.audit()
    assert not any(house.pages.is_cached(page_id) for page_id in house.pages.table[request.slot_id])
    house.run()
    assert house.hit(text(3 * P), tenant="b") == 0 and house.hit(text(3 * P), tenant="a") == 2 * P


def test_a_page_behind_another_prefix_is_another_page() -> None:
    house = House(hybrid=False)
    house.serve([*text(P, 1), *text(2 * P)])
    assert house.hit([*text(P, 2), *text(2 * P)]) == 0
    assert house.hit([*text(P), 5]) == 0


# When.


@pytest.mark.parametrize("hybrid", [True, False])
def test_siblings_of_one_step_compute_alone_and_keep_one_copy(hybrid: bool) -> None:
    house = House(hybrid=hybrid, num_slots=9)
    prompt = text(3 * P + 2)
    requests = [house.ask(prompt, 3) for _ in range(4)]
    house.turn()
    house.audit()
    assert [request.hit_len for request in requests] == [0, 0, 0, 0]
    tables = [house.pages.table[r.slot_id, :3].tolist() for r in requests]
    assert tables[1:] == tables[:1] * 3, "computed four times, kept four times"
    assert [house.pages.refs[page_id] for page_id in tables[0]] == [4, 4, 4]
    own = {int(house.pages.table[r.slot_id, 3]) for r in requests}
    assert len(own) == 4, "a page that is not full was shared"
    house.run()
    assert house.snapshots() == ([(12, "prompt"), (16, "decode")] if hybrid else [])


@pytest.mark.parametrize("hybrid", [True, False])
def test_what_a_step_publishes_is_not_found_in_the_same_step(hybrid: bool) -> None:
    house = House(hybrid=hybrid)
    prompt = text(3 * P)
    house.ask(prompt, 5)
    house.turn()
    request = house.ask(prompt)
    assert house.expected_hit(known(request)) == 0
    start = house.prefix.admit(request.chain, 3 * P)
    assert start is not None and start.hit_len == 0 and start.restore_from == 0
    house.prefix.release(start.slot_id)
    house.prefix.tick()
    start = house.prefix.admit(request.chain, 3 * P)
    assert start is not None and start.hit_len == 2 * P
    house.prefix.release(start.slot_id)
    house.run()


def test_each_step_asks_for_another_slot_for_a_snapshot_that_is_not_stored_yet() -> None:
    """Steps are planned before it is known that an earlier one came to its edge."""
    house = House(budget=3 * P + 1)
    request = house.ask(text(3 * P), 9)
    house.turn()
    house.prefix.tick()
    take = house.prefix.take(request.slot_id, 0, 3 * P)
    free = house.slots.num_free
    assert take is not None and house.prefix.take(request.slot_id, 0, 3 * P) == take
    assert house.prefix.take(request.slot_id, P, 4 * P) == take and house.slots.num_free == free
    house.run()
    house.audit()


def test_a_snapshot_that_a_sibling_stored_is_not_stored_again() -> None:
    house = House(budget=3 * P + 1)
    prompt = text(3 * P)
    first, second = house.ask(prompt, 9), house.ask(prompt, 9)
    house.turn()
    assert first.committed_len == 3 * P and second.committed_len == 1
    before = house.prefix.statistics.num_snapshots
    house.prefix.tick()
    assert house.prefix.chunk_end(second.slot_id, 0, 3 * P) == 3 * P
    assert house.prefix.take(second.slot_id, 0, 2 * P) is None
    take = house.prefix.take(second.slot_id, 0, 3 * P)
    assert take is not None and take.edge == 3 * P, "the edge behind the prompt has none"
    house.prefix.commit(second.slot_id, second.committed_len, second.total_len)
    house.audit()
    assert house.prefix.statistics.num_snapshots == before


def test_a_request_that_ends_between_plan_and_commit_gives_back_what_it_took() -> None:
    house = House(pipeline_depth=1)
    request = house.ask(text(3 * P), 5)
    house.turn()
    assert house.prefix._leases[request.slot_id].taken
    house.loop.abort(request.id)
    house.run()
    assert house.slots.num_free == house.slots.num_slots - 1


def test_committing_twice_changes_nothing() -> None:
    house = House()
    request = house.ask(text(3 * P), 5)
    house.turn()
    before = (house.pages.table.copy(), house.snapshots(), house.pages.num_free, house.slots.num_free)
    for _ in range(2):
        house.prefix.commit(request.slot_id, request.committed_len, request.total_len)
    house.audit()
    after = (house.pages.table, house.snapshots(), house.pages.num_free, house.slots.num_free)
    assert (before[0] == after[0]).all() and before[1:] == after[1:]


# Which snapshots.


@pytest.mark.parametrize("shared", [P, P + 1, 2 * P - 1, 2 * P, 3 * P + 3])
def test_the_second_sighting_of_a_shared_prefix_makes_its_snapshot(shared: int) -> None:
    house = House()
    prompts = [[*text(shared), *text(2 * P + 1, seed)] for seed in (1, 2, 3, 4)]
    junction = shared // P * P
    assert serve_all(house, prompts) == [0, 0, junction, junction]
    if junction:
        assert (junction, "junction") in house.snapshots()


def test_a_longer_prompt_is_no_junction() -> None:
    """Where a prompt merely goes on behind what is cached, nothing branches."""
    house = House()
    house.serve(text(3 * P + 1))
    (entry,) = (entry for _, entry in house.prefix.contents() if entry.slot_id)
    house.prefix._drop_snapshot(entry)
    assert house.hit(text(5 * P)) == 0
    assert "junction" not in [kind for _, kind in house.snapshots()]


def test_a_junction_is_noticed_behind_a_hit() -> None:
    house = House()
    common, deeper = text(2 * P), text(2 * P, 9)
    serve_all(house, [[*common, *text(P, seed)] for seed in (1, 2)])
    first, second, third = ([*common, *deeper, *text(P + 1, seed)] for seed in (3, 4, 5))
    assert serve_all(house, [first, second, third]) == [2 * P, 2 * P, 4 * P]


def test_a_prompt_is_cut_where_two_snapshots_fall_into_one_step() -> None:
    house = House()
    serve_all(house, [[*text(2 * P), *text(2 * P, 1)]])
    request = house.ask([*text(2 * P), *text(2 * P + 1, 2)], 5)
    house.turn()
    assert request.committed_len == 2 * P, "the chunk must end at the junction"
    house.turn()
    assert request.committed_len == 4 * P + 1
    assert {(8, "junction"), (16, "prompt")} <= set(house.snapshots())


@pytest.mark.parametrize("budget", [1, 3, P, P + 1, 3 * P])
@pytest.mark.parametrize("interval", [0, P, 2 * P])
def test_chunks_of_any_size_leave_the_same_snapshots(interval: int, budget: int) -> None:
    whole, cut = House(interval=interval), House(interval=interval, budget=budget)
    prompts = [[*text(3 * P + 1), *text(2 * P + 2, seed)] for seed in (1, 2)]
    assert serve_all(whole, prompts) == serve_all(cut, prompts)
    assert whole.snapshots() == cut.snapshots()


def test_the_newest_decode_snapshot_replaces_the_older_one() -> None:
    house = House()
    request = house.ask(text(P + 1), 6 * P)
    seen: set[tuple[int, str]] = set()
    while not request.finish_reason:
        house.turn()
        house.audit()
        decode = [edge for edge, kind in house.snapshots() if kind == "decode"]
        assert len(decode) <= 1, "one per request"
        seen.update(house.snapshots())
    assert {(edge, "decode") for edge in range(2 * P, 7 * P, P)} <= seen
    assert house.slots.num_free == house.slots.num_slots - 1 - 2


def test_a_decode_snapshot_that_others_started_from_stays() -> None:
    house = House()
    request = house.ask(text(P + 1), 6 * P)
    while request.committed_len < 3 * P + 1:
        house.turn()
    assert (3 * P, "decode") in house.snapshots()
    house.ask([*known(request, 3 * P), *text(3, 1)])
    house.run()
    assert {(3 * P, "decode"), (7 * P, "decode")} <= set(house.snapshots())
    (entry,) = (entry for _, entry in house.prefix.contents() if entry.slot_id and entry.edge == 3 * P)
    for behind in reversed(entry.subtree()[1:]):
        house.prefix._evict(behind)
    assert entry.group is not None and entry.group.below == 0


def test_a_decode_snapshot_where_others_branched_off_stays() -> None:
    """Two sampled answers to one prompt: the second one's page hangs below the first one's snapshot."""
    house = House()
    request = house.ask(text(P + 1), 6 * P)
    while request.committed_len < 3 * P + 1:
        house.turn()
    (entry,) = (entry for _, entry in house.prefix.contents() if entry.kind == "decode" and entry.slot_id)
    for _ in range(2):
        entry.children.add(tree.Entry(b"", entry, b"", 0, 0, 0))
    assert not house.prefix._is_outdone(entry)


def test_a_donated_slot_is_a_snapshot() -> None:
    """Page and chunk are equal here, so the slot of a request that ends stands at its last page's edge."""
    house = House(chunk_len=P, donate=True)
    request = house.serve(text(P + 1), 2 * P + 1)
    assert house.snapshots() == [(P, "prompt"), (3 * P, "decode")]
    assert house.hit(known(request)) == 3 * P


def test_a_donated_slot_outdoes_the_last_decode_snapshot() -> None:
    house = House(chunk_len=P, donate=True)
    request = house.ask(text(P + 1), 3 * P)
    while (2 * P, "decode") not in house.snapshots():
        house.turn()
    house.prefix.take = lambda *row: None
    house.run()
    assert house.snapshots() == [(P, "prompt"), (4 * P, "decode")]
    assert house.hit(known(request, 4 * P + 1)) == 4 * P
    house.audit()


@pytest.mark.parametrize("donate", [False, True])
def test_a_preempted_request_resumes_from_its_own_pages(donate: bool) -> None:
    house = House(chunk_len=P, donate=donate)
    request = house.ask(text(3 * P + 1), 3 * P)
    while request.committed_len < 5 * P:
        house.turn()
    house.scheduler._preempt(request)
    house.audit()
    house.run()
    assert request.hit_len == 5 * P
