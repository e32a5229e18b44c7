"""The page pool: which page ids are free, who holds the others, and the table of each slot's pages."""

from collections.abc import Callable, Sequence

import numpy as np


class PagePool:
    """Gives pages to slots in order of position. Page 0 is the dump page: it is never given away.

    A slot's pages are a row of `table`, so that nothing is copied per step but the rows of a batch. The
    prefix cache may hold a full page too; then any number of slots may hold it, and none writes it. A page
    that nobody holds is free.
    """

    def __init__(
        self,
        num_pages: int,
        page_len: int,
        num_slots: int,
        table_width: int,
        on_free: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_len = page_len
        # page of slot s, position p: [s, p // page_len]
        self.table = np.zeros((num_slots, table_width), np.int32)
        self.capacity = [0] * num_slots  # tokens for which the slot has pages
        self.refs = [0] * num_pages  # slots that hold the page
        self.num_idle = 0  # cached pages that no slot holds
        self._changes: dict[int, int] | None = None  # of the flat table, if somebody takes them
        self._cached = bytearray(num_pages)
        self._free = list(range(num_pages - 1, 0, -1))
        self._on_free = on_free

    def keep_changes(self) -> None:
        """From now on, for `take_changes`."""
        self._changes = {}

    def take_changes(self) -> dict[int, int]:
        """Entries of the flat table that got a page since the last call: place and page. None are kept unless
        somebody asked for them."""
        changes = self._changes or {}
        if changes:
            self._changes = {}
        return changes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, num_tokens: int) -> int:
        """How many pages so many tokens need."""
        return -(-num_tokens // self.page_len)

    def grow(self, slot_id: int, num_tokens: int) -> bool:
        """Let the slot hold so many tokens; False, and nothing done, if too few pages are free."""
        have = self.capacity[slot_id] // self.page_len
        need = self.count(num_tokens)
        if need - have > len(self._free):
            return False
        for index in range(have, need):
            page_id = self._free.pop()
            self.refs[page_id] = 1
            self._enter(slot_id, index, page_id)
        self.capacity[slot_id] = max(have, need) * self.page_len
        return True

    def share(self, slot_id: int, page_ids: Sequence[int]) -> None:
        """Let cached pages be the first ones of a slot that has none."""
        assert self.capacity[slot_id] == 0, f"slot {slot_id} has pages already"
        for index, page_id in enumerate(page_ids):
            self._hold(slot_id, index, page_id)
        self.capacity[slot_id] = len(page_ids) * self.page_len

    def swap(self, slot_id: int, index: int, page_id: int) -> None:
        """Let a slot hold a cached page of equal content in place of its own."""
        old_page_id = int(self.table[slot_id, index])
        self._hold(slot_id, index, page_id)
        self._leave([old_page_id])

    def keep(self, page_id: int) -> None:
        """The cache holds a page, which a slot holds and will not write again."""
        assert self.refs[page_id] and not self._cached[page_id], f"page {page_id} cannot be cached"
        self._cached[page_id] = True

    def drop(self, page_id: int) -> None:
        """The cache gives the page up."""
        assert self._cached[page_id], f"page {page_id} is not cached"
        self._cached[page_id] = False
        if self.refs[page_id] == 0:
            self.num_idle -= 1
            self._give_back([page_id])

    def is_cached(self, page_id: int) -> bool:
        return bool(self._cached[page_id])

    def release(self, slot_id: int) -> None:
        """Take all pages of a slot back."""
        page_ids = self.table[slot_id, : self.capacity[slot_id] // self.page_len].tolist()
        self.table[slot_id] = 0
        self.capacity[slot_id] = 0
        self._leave(page_ids)

    def _hold(self, slot_id: int, index: int, page_id: int) -> None:
        assert self._cached[page_id], f"page {page_id} is not cached: its holder may write it"
        if self.refs[page_id] == 0:
            self.num_idle -= 1
        self.refs[page_id] += 1
        self._enter(slot_id, index, page_id)

    def _enter(self, slot_id: int, index: int, page_id: int) -> None:
        self.table[slot_id, index] = page_id
        if self._changes is not None:
            self._changes[slot_id * self.table.shape[1] + index] = page_id

    def _leave(self, page_ids: list[int]) -> None:
        unheld: list[int] = []
        for page_id in page_ids:
            self.refs[page_id] -= 1
            if self.refs[page_id]:
                continue
            if self._cached[page_id]:
                self.num_idle += 1
            else:
                unheld.append(page_id)
        self._give_back(unheld)

    def _give_back(self, page_ids: list[int]) -> None:
        self._free.extend(reversed(page_ids))
        if self._on_free is not None and page_ids:
            self._on_free(page_ids)

    def audit(self, slot_ids: set[int]) -> None:
        """Every page is free or held by exactly those that it counts; only the given slots hold pages."""
        held = [0] * self.num_pages
        for slot_id, capacity in enumerate(self.capacity):
            num_held, rest = divmod(capacity, self.page_len)
            assert rest == 0, f"slot {slot_id} has pages for {capacity} tokens"
            assert slot_id in slot_ids or num_held == 0, f"slot {slot_id} is free but has {num_held} pages"
            assert not self.table[slot_id, num_held:].any(), f"slot {slot_id}: stale page ids in the table"
            for page_id in self.table[slot_id, :num_held].tolist():
                held[page_id] += 1
        assert held == self.refs, "a page is held by more or fewer slots than it counts"
        assert not held[0] and not self._cached[0], "somebody holds the dump page"
        in_use = [page_id for page_id in range(1, self.num_pages) if held[page_id] or self._cached[page_id]]
        assert sorted(in_use + self._free) == list(range(1, self.num_pages)), "pages lost or owned twice"
        idle = [page_id for page_id in in_use if not held[page_id]]
        assert len(idle) == self.num_idle, f"{len(idle)} idle pages, {self.num_idle} counted"
