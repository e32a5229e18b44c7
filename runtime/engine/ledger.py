"""Ids and lengths that change with every step, kept on the device so that no host waits for them.

The host plans with bounds (scheduler.py) and learns a step's outcome some steps later; the tensors here are
always up to date. Each has one entry per slot, never per row of a batch. The dump slot's, 0, stays zero.
"""

import numpy as np
import torch

from hemiola.runtime.config import Resolved


def ids_width(config: Resolved) -> int:
    """Columns of `ids`: the longest text, and the drafts behind it."""
    return config.max_len + config.num_drafts + 1


class Ledger:
    """Ids and lengths of the requests that hold a slot. Lengths are in tokens, int64."""

    def __init__(self, config: Resolved) -> None:
        shape = (config.num_slots, ids_width(config))
        self.ids = torch.zeros(shape, dtype=torch.int32)  # prompt, output, then drafts
        self.total_len = torch.zeros(config.num_slots, dtype=torch.int64)  # prompt and output
        self.committed_len = torch.zeros(config.num_slots, dtype=torch.int64)  # those whose state is final
        self.edge = torch.zeros(config.num_slots, dtype=torch.int64)  # where the slot's state stands
        self.num_drafts = torch.zeros(config.num_slots, dtype=torch.int64)  # ids behind total_len

    def open(self, slot_id: int, ids: np.ndarray, start: int) -> None:
        """A request begins at `start`, an edge, up to which its slot and pages are filled."""
        self.ids[slot_id, : len(ids)] = torch.from_numpy(ids)
        self.total_len[slot_id] = len(ids)
        self.committed_len[slot_id] = start
        self.edge[slot_id] = start
        self.num_drafts[slot_id] = 0

    def set_drafts(self, slot_ids: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> None:
        """The first num_drafts[n] of drafts[n] stand behind the text of slot_ids[n]."""
        places = self.total_len[slot_ids].unsqueeze(1) + torch.arange(drafts.shape[1])
        self.ids[slot_ids.unsqueeze(1), places] = drafts.to(torch.int32)
        self.num_drafts[slot_ids] = num_drafts
