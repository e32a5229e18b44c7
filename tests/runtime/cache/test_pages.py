"""Pages of slots, and those that the prefix cache holds and slots share."""

import pytest

from hemiola.runtime.cache.pages import PagePool

freed: list[int] = []


def make_pages(num_pages: int = 8) -> PagePool:
    freed.clear()
    return PagePool(num_pages, page_len=4, num_slots=5, table_width=8, on_free=freed.extend)


def test_pages_grow_by_position_and_come_back() -> None:
    pages = make_pages(6)
    assert pages.grow(1, 5) and pages.capacity[1] == 8
    first = pages.table[1, :2].tolist()
    assert pages.grow(2, 1) and pages.grow(1, 9)
    assert pages.table[1, :2].tolist() == first and pages.table[1, 3] == 0
    pages.audit({1, 2})
    pages.release(1)
    assert pages.num_free == 4 and not pages.table[1].any()
    pages.audit({2})


def test_the_dump_page_is_never_given_away() -> None:
    pages = make_pages(6)
    assert pages.grow(1, 20)
    assert 0 not in pages.table[1, :5]


def test_growing_is_all_or_nothing() -> None:
    pages = make_pages(6)
    assert pages.grow(1, 12)
    before = pages.table.copy()
    assert not pages.grow(2, 9)
    assert (pages.table == before).all() and pages.num_free == 2 and pages.capacity[2] == 0


def test_growing_to_less_takes_nothing() -> None:
    pages = make_pages(6)
    assert pages.grow(1, 9) and pages.grow(1, 2) and pages.capacity[1] == 12 and pages.num_free == 2


def cached_path(pages: PagePool, slot_id: int, num_pages: int) -> list[int]:
    """So many pages of a slot, which the cache holds too."""
    assert pages.grow(slot_id, num_pages * pages.page_len)
    page_ids = pages.table[slot_id, :num_pages].tolist()
    for page_id in page_ids:
        pages.keep(page_id)
    return page_ids


def test_a_cached_page_outlives_its_slot() -> None:
    pages = make_pages()
    page_ids = cached_path(pages, 1, 2)
    pages.grow(1, 9)
    pages.audit({1})
    pages.release(1)
    pages.audit(set())
    assert pages.num_idle == 2 and pages.num_free == 5
    assert len(freed) == 1 and freed[0] not in page_ids


def test_shared_pages_come_first_and_growth_follows() -> None:
    pages = make_pages()
    page_ids = cached_path(pages, 1, 2)
    pages.share(2, page_ids)
    assert pages.capacity[2] == 8 and pages.grow(2, 9)
    assert pages.table[2, :2].tolist() == page_ids and pages.table[2, 2] not in page_ids
    assert [pages.refs[page_id] for page_id in page_ids] == [2, 2]
    pages.audit({1, 2})
    pages.release(1)
    assert pages.num_idle == 0, "the other slot still holds them"
    pages.release(2)
    assert pages.num_idle == 2
    pages.audit(set())


def test_an_idle_page_that_is_shared_is_not_idle() -> None:
    pages = make_pages()
    page_ids = cached_path(pages, 1, 2)
    pages.release(1)
    pages.share(3, page_ids[:1])
    assert pages.num_idle == 1
    pages.audit({3})


def test_a_dropped_page_is_freed_by_its_last_holder() -> None:
    pages = make_pages()
    (page_id,) = cached_path(pages, 1, 1)
    pages.share(2, [page_id])
    pages.drop(page_id)
    pages.audit({1, 2})
    pages.release(1)
    assert not freed
    pages.release(2)
    assert freed == [page_id] and pages.num_free == 7


def test_an_idle_page_that_is_dropped_is_free_at_once() -> None:
    pages = make_pages()
    (page_id,) = cached_path(pages, 1, 1)
    pages.release(1)
    pages.drop(page_id)
    assert freed == [page_id] and pages.num_idle == 0 and pages.num_free == 7
    pages.audit(set())


def test_a_swap_frees_the_own_copy_only() -> None:
    pages = make_pages()
    page_ids = cached_path(pages, 1, 2)
    pages.grow(2, 12)
    own = pages.table[2, :3].tolist()
    pages.swap(2, 1, page_ids[1])
    assert pages.table[2, :3].tolist() == [own[0], page_ids[1], own[2]] and freed == [own[1]]
    assert pages.refs[page_ids[1]] == 2 and pages.refs[own[1]] == 0
    pages.audit({1, 2})


@pytest.mark.parametrize(
    "act",
    [
        lambda pages, page_id: pages.keep(page_id),  # twice
        lambda pages, page_id: pages.keep(7),  # a free page
        lambda pages, page_id: pages.drop(7),
        lambda pages, page_id: pages.share(2, [7]),  # not cached: its holder may write it
        lambda pages, page_id: pages.share(1, [page_id]),  # has pages
        lambda pages, page_id: pages.swap(1, 0, 7),
    ],
)
def test_what_makes_no_sense_is_not_done(act: object) -> None:
    pages = make_pages()
    (page_id,) = cached_path(pages, 1, 1)
    assert 7 in pages._free
    with pytest.raises(AssertionError):
        act(pages, page_id)


def leak(pages: PagePool) -> None:
    pages._free.pop()


def double(pages: PagePool) -> None:
    pages.table[2, 0], pages.capacity[2] = pages.table[1, 0], 4


def stale(pages: PagePool) -> None:
    pages.table[1, 7] = 3


def orphan(pages: PagePool) -> None:
    pages.grow(3, 1)


def miscounted(pages: PagePool) -> None:
    pages.refs[int(pages.table[1, 0])] += 1


def forgotten(pages: PagePool) -> None:
    pages.release(1)
    pages._cached[pages._free[0]] = True


def idle_miscounted(pages: PagePool) -> None:
    pages.num_idle += 1


def unheld(pages: PagePool) -> None:
    page_id = int(pages.table[1, 1])
    pages._cached[page_id] = False
    pages.table[1, 1], pages.capacity[1] = 0, 4
    pages.refs[page_id] = 0


@pytest.mark.parametrize(
    "harm", [leak, double, stale, orphan, miscounted, forgotten, idle_miscounted, unheld]
)
def test_the_audit_finds(harm: object) -> None:
    pages = make_pages()
    cached_path(pages, 1, 2)
    pages.audit({1, 2})
    harm(pages)
    with pytest.raises(AssertionError):
        pages.audit({1, 2})
