"""What the pool refuses, and what its audit finds; all else: test_prefix.py, ../engine/test_storms.py."""

import random

import numpy as np
import pytest
import torch

from hemiola.plugins.step import forms
from hemiola.runtime.cache.pages import PagePool


def make_pages() -> PagePool:
    return PagePool(8, page_len=4, num_slots=5, table_width=8)


def test_growing_is_all_or_nothing() -> None:
    pages = make_pages()
    assert pages.grow(1, 20)
    before = pages.table.copy()
    assert not pages.grow(2, 9)
    assert (pages.table == before).all() and pages.num_free == 2 and pages.capacity[2] == 0


def cached_path(pages: PagePool, slot_id: int, num_pages: int) -> list[int]:
    """So many pages of a slot, which the cache holds too."""
    assert pages.grow(slot_id, num_pages * pages.page_len)
    page_ids = pages.table[slot_id, :num_pages].tolist()
    for page_id in page_ids:
        pages.keep(page_id)
    return page_ids


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


# What a device's table is told.


@pytest.mark.parametrize("seed", range(5))
def test_an_entry_that_changed_twice_since_the_last_step_has_an_older_value(seed: int) -> None:
    """A scatter with two values for a place may keep either. What a slot holds must be as the host has it."""
    dice = random.Random(seed)
    pages = make_pages()
    pages.keep_changes()
    there = torch.zeros(pages.table.shape, dtype=torch.int32)
    for _ in range(60):
        for _ in range(dice.randint(1, 40)):  # between two steps
            slot_id = dice.randint(1, 4)
            if dice.random() < 0.5:
                pages.release(slot_id)
            else:
                pages.grow(slot_id, dice.randint(1, 24))
        changes = np.array(list(pages.take_changes().items()), np.int64).reshape(-1, 2)
        assert len(np.unique(changes[:, 0])) == len(changes)
        shuffled = changes[dice.sample(range(len(changes)), len(changes))]
        forms("compiled").change(torch.from_numpy(shuffled), there)
        for slot_id in range(1, 5):
            held = pages.capacity[slot_id] // pages.page_len
            assert there[slot_id, :held].tolist() == pages.table[slot_id, :held].tolist()


def test_a_swapped_page_is_not_told() -> None:
    pages = make_pages()
    (cached,) = cached_path(pages, 1, 1)
    pages.grow(2, 4)
    pages.keep_changes()
    pages.swap(2, 0, cached)
    assert pages.take_changes() == {2 * pages.table.shape[1]: cached} and pages.take_changes() == {}
