"""A fake session in which NaN spreads as in a model: to all that is computed from it."""

import math

import numpy as np
from kit.fake_session import FakeSession, hashed

from hemiola.plugins.rows import live_rows
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.session import Computed
from hemiola.runtime.step.program import Batch


class FaultySession(FakeSession):
    """Steps whose numbers are in `faults` (from 0) compute `value` for all rows, or spoil states only."""

    def __init__(
        self,
        config: Resolved,
        faults: set[int] | None = None,
        hybrid: bool = True,
        value: float = math.nan,
        spoils: str = "all",
    ) -> None:
        super().__init__(config, hashed, hybrid)
        self.faults, self.value, self.spoils = faults or set(), value, spoils
        self.dirty_pages = np.zeros(self.pages.shape, bool)
        self.dirty_slots: set[int] = set()

    def free_pages(self, page_ids: list[int]) -> None:
        super().free_pages(page_ids)
        self.dirty_pages[page_ids] = False

    def free_slots(self, slot_ids: list[int]) -> None:
        super().free_slots(slot_ids)
        self.dirty_slots -= set(slot_ids)

    def copy_slot(self, source: int, target: int) -> None:
        super().copy_slot(source, target)
        self._mark(target, source in self.dirty_slots)

    def run(self, batch: Batch) -> Computed:
        strikes = len(self.shapes) in self.faults
        out = super().run(batch)
        wanted = {token: at for at, token in enumerate(batch.logits_ids.tolist())}
        rows = live_rows(batch.rows, self.config.chunk_len)
        for row, table in zip(rows, batch.page_table.tolist(), strict=True):
            places = [self._place(table, position) for position in range(row.end)]
            read = places[: row.committed]
            spoilt = row.slot in self.dirty_slots or any(self.dirty_pages[place] for place in read)
            bad = spoilt or (strikes and self.spoils == "all")
            for place in places[row.committed :]:
                self.dirty_pages[place] = bad
            self._mark(row.slot, spoilt or strikes)
            self._mark(row.snapshot_slot, spoilt or strikes)
            for token in range(row.first, row.first + row.num_tokens):
                if bad and token in wanted:
                    out.logits[wanted[token]] = self.value
        return out

    def _mark(self, slot_id: int, dirty: bool) -> None:
        if dirty and slot_id:
            self.dirty_slots.add(slot_id)
        else:
            self.dirty_slots.discard(slot_id)
