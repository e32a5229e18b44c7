"""Ids and lengths that change with every step, kept on the device so that no host waits for them.

The host plans with bounds (scheduler.py) and learns a step's outcome some steps later; the tensors here are
always up to date. Each has one entry per slot, never per row of a batch. The dump slot's, 0, stays zero.
"""

import numpy as np
import torch

from hemiola.runtime.config import Resolved
from hemiola.runtime.device.transfer import upload


def ids_width(config: Resolved) -> int:
    """Columns of `ids`: the longest text, and the drafts behind it."""
    return config.max_len + config.num_drafts + 1


class Ledger:
    """Ids and lengths of the requests that hold a slot. Lengths are in tokens, int64."""

    def __init__(self, config: Resolved, device: torch.device) -> None:
        shape = (config.num_slots, ids_width(config))
        self.lengths = lengths = torch.zeros(4, config.num_slots, dtype=torch.int64, device=device)
        self.device = device
        self.ids = torch.zeros(shape, dtype=torch.int32, device=device)  # prompt, output, then drafts
        self.total_len = lengths[0]  # prompt and output
        self.committed_len = lengths[1]  # those whose state is final
        self.edge = lengths[2]  # where the slot's state stands
        self.num_drafts = lengths[3]  # ids behind total_len

    def open(self, slot_id: int, ids: np.ndarray, start: int) -> None:
        """A request begins at `start`, an edge, up to which its slot and pages are filled."""
        self.ids[slot_id, : len(ids)] = upload(self.device, ids)[0]
        self.total_len[slot_id].fill_(len(ids))  # `= len(ids)` waits
        self.committed_len[slot_id].fill_(start)
        self.edge[slot_id].fill_(start)
        self.num_drafts[slot_id].fill_(0)
