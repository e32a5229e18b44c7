"""The slot pool: which slots are free, and at which edge the state of each stands."""

from collections.abc import Callable

import numpy as np


class SlotPool:
    """Slot 0 is the dump slot: it is never given away. A slot's content is known here only by its edge."""

    def __init__(
        self, num_slots: int, chunk_len: int, on_free: Callable[[list[int]], None] | None = None
    ) -> None:
        self.num_slots = num_slots
        self.chunk_len = chunk_len
        self.edge = np.zeros(num_slots, np.int32)  # tokens whose effect is in the slot's state
        self._free = list(range(num_slots - 1, 0, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A slot at edge 0; its content is not to be read."""
        slot_id = self._free.pop()
        self.edge[slot_id] = 0
        return slot_id

    def commit(self, slot_ids: list[int], final_len: list[int]) -> None:
        """After a step: each state stands at the last edge that final tokens have passed."""
        self.edge[slot_ids] = np.array(final_len, np.int32) // self.chunk_len * self.chunk_len

    def release(self, slot_id: int) -> None:
        self.edge[slot_id] = 0
        self._free.append(slot_id)
        if self._on_free is not None:
            self._on_free([slot_id])

    def audit(self, slot_ids: set[int]) -> None:
        """Every slot is free or one of the given ones; edges lie on the grid."""
        assert sorted([*slot_ids, *self._free]) == list(range(1, self.num_slots)), "slots lost or owned twice"
        assert not (self.edge % self.chunk_len).any(), "an edge is off the grid"
        assert not self.edge[self._free].any(), "a free slot has an edge"
