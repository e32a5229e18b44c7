"""Pages and slots."""

import pytest

from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.slots import SlotPool


def make_pages(num_pages: int = 6) -> PagePool:
    return PagePool(num_pages, page_len=4, num_slots=4, table_width=8)


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


def leak(pages: PagePool) -> None:
    pages._free.pop()


def double(pages: PagePool) -> None:
    pages.table[2, 0], pages.capacity[2] = pages.table[1, 0], 4


def stale(pages: PagePool) -> None:
    pages.table[1, 7] = 3


def orphan(pages: PagePool) -> None:
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
    slots = SlotPool(4, chunk_len=16)
    ids = [slots.acquire() for _ in range(3)]
    assert sorted(ids) == [1, 2, 3] and slots.num_free == 0
    slots.commit(ids, [15, 16, 47])
    assert slots.edge[ids].tolist() == [0, 16, 32]
    slots.audit(set(ids))
    slots.release(ids[1])
    slots.audit({ids[0], ids[2]})
    assert slots.acquire() == ids[1] and slots.edge[ids[1]] == 0


def test_the_audit_of_slots_finds() -> None:
    slots = SlotPool(4, chunk_len=16)
    slot_id = slots.acquire()
    for held in (set(), {slot_id, 3}):
        with pytest.raises(AssertionError):
            slots.audit(held)
    slots.edge[slot_id] = 5
    with pytest.raises(AssertionError, match="grid"):
        slots.audit({slot_id})
