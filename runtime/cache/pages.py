"""The page pool: which page ids are free, and the table of each slot's pages."""

from collections.abc import Callable

import numpy as np


class Pages:
    """Gives pages to slots in order of position. Page 0 is the dump page: it is never given away.

    A slot's pages are a row of `table`, so that nothing is copied per step but the rows of a batch.
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
        self.table = np.zeros(
            (num_slots, table_width), np.int32
        )  # page of slot s, position p: [s, p // page_len]
        self.capacity = [0] * num_slots  # tokens for which the slot has pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_len)

    def grow(self, slot_id: int, num_tokens: int) -> bool:
        """Let the slot hold so many tokens; False, and nothing done, if too few pages are free."""
        have = self.capacity[slot_id] // self.page_len
        need = self.count(num_tokens)
        if need - have > len(self._free):
            return False
        for index in range(have, need):
            self.table[slot_id, index] = self._free.pop()
        self.capacity[slot_id] = max(have, need) * self.page_len
        return True

    def release(self, slot_id: int) -> None:
        """Take all pages of a slot back."""
        page_ids = self.table[slot_id, : self.capacity[slot_id] // self.page_len].tolist()
        self.table[slot_id] = 0
        self.capacity[slot_id] = 0
        self._free.extend(reversed(page_ids))
        if self._on_free is not None:
            self._on_free(page_ids)

    def audit(self, slot_ids: set[int]) -> None:
        """Every page is free or in exactly one place of the table; only the given slots have pages."""
        owned: list[int] = []
        for slot_id, capacity in enumerate(self.capacity):
            num_owned, rest = divmod(capacity, self.page_len)
            assert rest == 0, f"slot {slot_id} has pages for {capacity} tokens"
            assert slot_id in slot_ids or num_owned == 0, f"slot {slot_id} is free but has {num_owned} pages"
            assert not self.table[slot_id, num_owned:].any(), f"slot {slot_id}: stale page ids in the table"
            owned += self.table[slot_id, :num_owned].tolist()
        assert sorted(owned + self._free) == list(range(1, self.num_pages)), "pages lost or owned twice"
