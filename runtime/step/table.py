"""The page table on the device."""

import numpy as np
import torch

from hemiola.runtime.cache.pages import PagePool


class PageTable:
    """A CPU reads the host's own. For a GPU there is a copy: changes go over with each step."""

    def __init__(self, pages: PagePool, device: torch.device, is_copy: bool) -> None:
        self._pages = pages
        self.on_device = torch.from_numpy(pages.table)
        if is_copy:
            pages.keep_changes()
            self.on_device = torch.zeros(pages.table.shape, dtype=torch.int32, device=device)

    def changes(self) -> np.ndarray:
        """Entries [E, 2] int64 that changed since this was called: places of the flat table, and pages."""
        return np.array(list(self._pages.take_changes().items()), np.int64).reshape(-1, 2)
