"""Pages, slots and their storage."""

import pytest
import torch

from hemiola.runtime.cache.pages import Pages
from hemiola.runtime.cache.slots import Slots
from hemiola.runtime.device.memory import Storage, free_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import State

STATES = (
    State(name="layers.0.k", kind="page", shape=(4, 2), dtype="float32"),
    State(name="layers.1.state", kind="slot", shape=(3,), dtype="float32"),
    State(name="layers.1.count", kind="slot", shape=(), dtype="int32"),
)


def make_pages(num_pages: int = 6) -> Pages:
    return Pages(num_pages, page_len=4, num_slots=4, table_width=8)


def test_pages_grow_by_position_and_come_back() -> None:
    pages = make_pages()
    assert pages.grow(1, 5) and pages.capacity[1] == 8
    first = pages.table[1, :2].tolist()
    assert pages.grow(2, 1) and pages.grow(1, 9)
    assert pages.table[1, :2].tolist() == first and pages.table[1, 3] == 0
    pages.audit({1, 2})
    pages.release(1)
    assert pages.num_free == 4 and not pages.table[1].any()
    pages.audit({2})


def test_the_dump_page_is_never_given_away() -> None:
    pages = make_pages()
    assert pages.grow(1, 20)
    assert 0 not in pages.table[1, :5]


def test_growing_is_all_or_nothing() -> None:
    pages = make_pages()
    assert pages.grow(1, 12)
    before = pages.table.copy()
    assert not pages.grow(2, 9)
    assert (pages.table == before).all() and pages.num_free == 2 and pages.capacity[2] == 0


def test_growing_to_less_takes_nothing() -> None:
    pages = make_pages()
    assert pages.grow(1, 9) and pages.grow(1, 2) and pages.capacity[1] == 12 and pages.num_free == 2


def leak(pages: Pages) -> None:
    pages._free.pop()


def double(pages: Pages) -> None:
    pages.table[2, 0], pages.capacity[2] = pages.table[1, 0], 4


def stale(pages: Pages) -> None:
    pages.table[1, 7] = 3


def orphan(pages: Pages) -> None:
    pages.grow(3, 1)


@pytest.mark.parametrize("harm", [leak, double, stale, orphan])
def test_the_audit_of_pages_finds(harm: object) -> None:
    pages = make_pages()
    pages.grow(1, 5)
    pages.audit({1, 2})
    harm(pages)
    with pytest.raises(AssertionError):
        pages.audit({1, 2})


def test_slots_stand_at_the_last_edge_that_tokens_passed() -> None:
    slots = Slots(4, chunk_len=16)
    ids = [slots.acquire() for _ in range(3)]
    assert sorted(ids) == [1, 2, 3] and slots.num_free == 0
    slots.commit(ids, [15, 16, 47])
    assert slots.edge[ids].tolist() == [0, 16, 32]
    slots.audit(set(ids))
    slots.release(ids[1])
    slots.audit({ids[0], ids[2]})
    assert slots.acquire() == ids[1] and slots.edge[ids[1]] == 0


def test_the_audit_of_slots_finds() -> None:
    slots = Slots(4, chunk_len=16)
    slot_id = slots.acquire()
    for held in (set(), {slot_id, 3}):
        with pytest.raises(AssertionError):
            slots.audit(held)
    slots.edge[slot_id] = 5
    with pytest.raises(AssertionError, match="grid"):
        slots.audit({slot_id})


def test_poison_marks_fresh_and_freed_places() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4, poison=True)
    k, state, count = (storage.tensors[s.name] for s in STATES)
    assert k.shape == (3, 4, 2) and state.shape == (4, 3) and count.shape == (4,)
    assert k.isnan().all() and state.isnan().all() and (count < 0).all()
    k[:], state[:], count[:] = 1, 2, 3
    storage.free_pages([2])
    storage.free_slots([1, 3])
    assert k[2].isnan().all() and (k[:2] == 1).all()
    assert state[[1, 3]].isnan().all() and (state[[0, 2]] == 2).all() and count.tolist()[2] == 3


def test_without_poison_nothing_is_written() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4)
    storage.tensors["layers.0.k"][:] = 1
    storage.free_pages([1])
    assert (storage.tensors["layers.0.k"] == 1).all()


def test_copy_slot_copies_every_slot_state_and_no_page() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4)
    storage.tensors["layers.1.state"][2] = torch.tensor([1.0, 2.0, 3.0])
    storage.tensors["layers.1.count"][2] = 9
    storage.tensors["layers.0.k"][2] = 5
    storage.copy_slot(2, 1)
    assert storage.tensors["layers.1.state"][1].tolist() == [1, 2, 3]
    assert storage.tensors["layers.1.count"].tolist() == [0, 9, 9, 0]
    assert not storage.tensors["layers.0.k"][1].any()


def test_free_bytes_is_what_this_machine_has() -> None:
    assert 2**20 < free_bytes() < 2**50


def test_more_pages_than_memory_is_a_refusal_not_a_traceback() -> None:
    with pytest.raises(Refused, match="no memory for 1000000000000 pages and 2 slots; lower num_pages"):
        Storage(STATES, 10**12, 2)
