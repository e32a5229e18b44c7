"""The page table on the device."""

from typing import Protocol

import numpy as np
import torch


class TableSource(Protocol):
    """A PagePool, or a follower's replica of its table."""

    table: np.ndarray  # [S, W] int32

    def keep_changes(self) -> None: ...

    def take_changes(self) -> dict[int, int]: ...


class PageTable:
    """A CPU reads the host's own. For a GPU there is a copy: changes go over with each step."""

    def __init__(self, pages: TableSource, device: torch.device, is_copy: bool) -> None:
        self._pages, self._is_copy = pages, is_copy
        self._told: dict[int, int] = {}  # to followers, not yet to the device
        self.on_device = torch.from_numpy(pages.table)
        if is_copy:
            pages.keep_changes()
            self.on_device = torch.zeros(pages.table.shape, dtype=torch.int32, device=device)

    def changes(self) -> np.ndarray:
        """Entries [E, 2] int64 that changed since this was called: places of the flat table, and pages."""
        changes, self._told = self._told | self._pages.take_changes(), {}
        return _entries(changes)

    def tell(self) -> np.ndarray:
        """The same, for replicas of this table; the device gets them, too."""
        changes = self._pages.take_changes()
        if self._is_copy:
            self._told |= changes
        return _entries(changes)


def _entries(changes: dict[int, int]) -> np.ndarray:
    return np.array(list(changes.items()), np.int64).reshape(-1, 2)
