"""The slot pool: which slots are free, and at which edge the state of each stands."""

from collections.abc import Callable


class SlotPool:
    """Slot 0 is the dump slot: it is never given away. A slot's content is known here only by its edge."""

    def __init__(
        self, num_slots: int, chunk_len: int, on_free: Callable[[list[int]], None] | None = None
    ) -> None:
        self.num_slots = num_slots
        self.chunk_len = chunk_len
        self.edge = [0] * num_slots  # tokens whose effect is in the slot's state
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

    def commit(self, slot_id: int, final_len: int) -> int:
        """After a step: the state stands at the last edge that final tokens have passed. Returns it."""
        edge = self.edge[slot_id] = final_len // self.chunk_len * self.chunk_len
        return edge

    def release(self, slot_id: int) -> None:
        self.edge[slot_id] = 0
        self._free.append(slot_id)
        if self._on_free is not None:
            self._on_free([slot_id])

    def audit(self, slot_ids: set[int]) -> None:
        """Every slot is free or one of the given ones; edges lie on the grid."""
        assert sorted([*slot_ids, *self._free]) == list(range(1, self.num_slots)), "slots lost or owned twice"
        assert not any(edge % self.chunk_len for edge in self.edge), "an edge is off the grid"
        assert not any(self.edge[slot_id] for slot_id in self._free), "a free slot has an edge"
