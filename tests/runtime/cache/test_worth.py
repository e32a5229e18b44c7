"""What snapshots and pages are worth: nested ones, shared ones, and those that save nothing."""

import itertools

import pytest
from kit.house import House, P, serve_all, text

from hemiola.runtime.cache.eviction import Cost, Evictor, above
from hemiola.runtime.cache.tree import Entry


def node(parent: Entry | None, edge: int) -> Entry:
    entry = Entry(b"", parent, b"", edge, edge, 0)
    if parent is not None:
        parent.children.add(entry)
    return entry


def chain(parent: Entry, num_pages: int) -> list[Entry]:
    found = [parent]
    for _ in range(num_pages):
        found.append(node(found[-1], found[-1].edge + P))
    return found[1:]


@pytest.fixture
def evictor() -> Evictor:
    made = Evictor(Cost(page_bytes=10, slot_bytes=40, token=1.0, pair=0.5), page_len=P)
    made.reuse.index = lambda group, age: 1.0
    return made


def test_a_nested_snapshot_is_worth_what_the_one_above_it_saves_already(evictor: Evictor) -> None:
    """In whatever order they come: the work of all is the work up to the last edge, counted once."""
    path = chain(node(None, 0), 6)
    chosen = [path[1], path[2], path[5]]
    for slot_id, entry in enumerate([chosen[1], chosen[2], chosen[0]], 1):
        evictor.attach(entry, slot_id, "prompt")
    gains = [evictor.value(entry) for entry in chosen]
    edges = [0, *(entry.edge for entry in chosen)]
    work = [evictor.cost.work(edge) for edge in edges]
    assert gains == [after - before for before, after in itertools.pairwise(work)]
    assert sum(gains) == evictor.cost.work(6 * P)
    assert evictor.density(chosen[2]) == gains[2] / (40 + 10 * 3), "those above it stay"
    evictor.detach(chosen[1])
    assert evictor.value(chosen[2]) == work[3] - work[1] and evictor.value(chosen[0]) == work[1]


def test_pages_above_a_shared_snapshot_are_charged_to_every_leaf_behind_it(evictor: Evictor) -> None:
    """They stay when a leaf goes: a leaf frees its slot and the pages behind the snapshot above it."""
    common = chain(node(None, 0), 8)[-1]
    leaves = [chain(common, num)[-1] for num in (1, 3)]
    for slot_id, entry in enumerate([common, *leaves], 1):
        evictor.attach(entry, slot_id, "prompt")
    for leaf, num_pages in zip(leaves, (1, 3), strict=True):
        assert above(leaf) is common
        saved = evictor.cost.work(leaf.edge) - evictor.cost.work(common.edge)
        assert evictor.density(leaf) == saved / (40 + 10 * num_pages)


def test_pages_that_two_leaves_share_are_charged_to_both(
    evictor: Evictor,
) -> None:
    """They were charged to every leaf: one whose own pages are few seemed to free most."""
    common = chain(node(None, 0), 8)[-1]
    leaves = [chain(common, num)[-1] for num in (1, 3)]
    for slot_id, entry in enumerate(leaves, 1):
        evictor.attach(entry, slot_id, "prompt")
    for leaf, num_pages in zip(leaves, (1, 3), strict=True):
        assert evictor.density(leaf) == evictor.cost.work(leaf.edge) / (40 + 10 * num_pages)
    evictor.detach(leaves[0])
    last = leaves[0]
    while last is not common:  # as its pages are evicted
        last.parent.children.remove(last)
        last = last.parent
    assert evictor.density(leaves[1]) == evictor.cost.work(leaves[1].edge) / (40 + 10 * 11)


def test_the_leaf_of_least_value_goes_before_that_of_least_value_per_byte(evictor: Evictor) -> None:
    """The long one saves more, but less for each of its bytes."""
    root = node(None, 0)
    short, long = chain(root, 1)[-1], chain(root, 10)[-1]
    evictor.cost = evictor.cost._replace(pair=0.0)
    for slot_id, entry in enumerate((short, long), 1):
        evictor.attach(entry, slot_id, "prompt" if entry is short else "decode")
        evictor.idle(entry)
    evictor.reuse.index = lambda group, age: 1.0 if group.kind == "prompt" else 0.2
    assert evictor.value(long) > evictor.value(short)
    assert evictor.page_victim() is long
    evictor.reuse.index = lambda group, age: 1.0
    assert evictor.page_victim() is short


def test_pages_that_no_request_can_begin_from_outlive_a_snapshot(evictor: Evictor) -> None:
    """However young they are, and whatever the snapshot saves."""
    root = node(None, 0)
    kept, lost = chain(root, 1)[-1], chain(root, 9)[-1]
    evictor.attach(kept, 1, "prompt")
    lost.used = 1000
    for entry in (kept, lost):
        evictor.idle(entry)
    assert evictor.page_victim() is lost


@pytest.mark.parametrize("stop", [2 * P, 2 * P + 2, 3 * P])
def test_a_snapshot_of_an_edge_that_was_passed_is_stored(stop: int) -> None:
    """A decoding row may pass the edge or not; it did, in a step that was not asked to store it."""
    house = House(budget=P)
    request = house.ask(text(P + 1), 5 * P)
    while request.committed_len < 2 * P - 2:
        house.turn()
    slot_id, prefix = request.slot_id, house.prefix
    lease = prefix._leases[slot_id]
    for take in lease.taken:
        house.slots.release(take.slot_id)
    lease.taken.clear()
    prefix.tick()
    take = prefix.take(slot_id, 2 * P - 2, 2 * P)
    assert take is not None and take.edge == 2 * P
    num_free = house.slots.num_free
    house.slots.edge[slot_id] = stop
    prefix.commit(slot_id, 2 * P, 2 * P)  # snapshot_edge=0: nothing was stored, though the page is published
    assert len(lease.path) == 2
    assert lease.taken == [] and house.slots.num_free == num_free + 1
    assert (2 * P, "decode") not in house.snapshots()
    assert prefix.take(slot_id, 2 * P, 3 * P - 2) is None, "no page's edge lies there"


def test_a_request_asks_again_for_an_edge_it_has_passed() -> None:
    """What it has not passed it asks for again, with the slot that it has."""
    house = House(budget=P)
    request = house.ask(text(4 * P + 1), 2)
    house.turn()
    first = house.prefix.take(request.slot_id, 2 * P, 4 * P)
    assert first is not None and first.edge == 4 * P
    assert house.prefix.take(request.slot_id, 2 * P + 2, 4 * P) == first
    assert house.prefix.take(request.slot_id, 4 * P, 4 * P + 2) is None
    house.run()


# Sizes behind which a constant might hide.


@pytest.mark.parametrize("hybrid", [True, False])
def test_more_than_64_rows_lose_a_page(hybrid: bool) -> None:
    """Rows begin from one prefix, and each goes on alone; then all are found."""
    sizes = {"num_pages": 800, "num_slots": 250, "max_rows": 80, "max_len": 32}
    house = House(hybrid=hybrid, **sizes)
    serve_all(house, [[*text(2 * P), *text(2, seed)] for seed in (200, 201)])
    prompts = [[*text(2 * P), *text(2 * P + 1, seed)] for seed in range(80)]
    for hit in (2 * P, 4 * P):
        requests = [house.ask(prompt, 3) for prompt in prompts]
        house.turn()
        assert len(house.scheduler.running) == 80
        assert len({int(house.pages.table[r.slot_id, 4]) for r in requests}) == 80
        assert house.pages.refs[int(house.pages.table[requests[0].slot_id, 0])] == 80
        house.run()
        assert {request.hit_len for request in requests} == {hit}


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("length", [4097, 4300])
def test_a_prompt_beyond_4096_tokens_is_cached_in_part(hybrid: bool, length: int) -> None:
    page = 64
    sizes = {"num_pages": 200, "max_rows": 2, "max_len": 4500, "page_len": page}
    house = House(hybrid=hybrid, budget=1000, **sizes)
    prompt = text(length)
    first = house.serve(prompt, 3)
    again = house.serve(prompt, 3)
    assert again.hit_len == (length - 1) // page * page
    assert again.ids.tolist() == first.ids.tolist()
    other = [*prompt[:-1], 9]
    assert house.hit([*other[:100], 9, *other[101:]]) in (0, page)
