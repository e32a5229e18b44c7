"""Prompt lookup: what followed the last occurrence of the text's own suffix (after arXiv 2304.04487)."""

import numpy as np
import torch

from hemiola.runtime.device.transfer import upload
from hemiola.runtime.engine.bucket import Bucket, Fed
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.step import Batch, Plan


def lookup(
    ids: torch.Tensor, total_len: torch.Tensor, min_n: int, max_n: int, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [R, num_drafts] for texts ids[R, W] of total_len[R] ids, and which rows [R] have any.

    The ids after the latest earlier occurrence of the longest suffix of min_n..max_n ids that occurs earlier.
    An occurrence that overlaps the end of the text continues into the proposal, as a period would.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    last = total_len.unsqueeze(1) - 1
    matched = torch.zeros_like(ids)  # [R, W] of the ids up to here, how many equal the text's last ones
    alive = place < last  # a suffix does not find itself
    for n in range(max_n):
        suffix = ids.gather(1, (last - n).clamp(min=0))
        alive = alive & (ids.roll(n, 1) == suffix) & (place >= n)
        matched += alive
    matched = torch.where(matched >= min_n, matched, 0)
    # the latest of the longest
    best = (matched.to(torch.int64) * ids.shape[1] + place).argmax(1, keepdim=True)
    found = matched.gather(1, best).squeeze(1) > 0
    period = last - best
    ahead = torch.arange(num_drafts, device=ids.device) % period.clamp(min=1)
    return ids.gather(1, (best + 1 + ahead).clamp(max=ids.shape[1] - 1)), found


class NgramProposer:
    """Prompt lookup for every row with room."""

    def __init__(self, ledger: Ledger, min_n: int, max_n: int) -> None:
        self.ledger = ledger
        self.min_n, self.max_n = min_n, max_n

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        rows = [row for row in plan.rows if row.room > 0]
        if not rows:
            return
        if self.ledger.device.type == "cpu":
            from hemiola.plugins.cpu import code  # numba is not needed elsewhere
            from hemiola.runtime.engine import compiled

            asked = compiled.all_asked(rows)
            columns = compiled.Columns.of(code.EAGER, self.ledger)
            compiled.look_up(asked, columns, self.min_n, self.max_n)
            return
        most_room = max(row.room for row in rows)
        fixed = np.array([(row.slot_id, row.room) for row in rows], np.int64).T
        slot_ids, room = upload(self.ledger.device, fixed)[0]
        most_len = max(row.request.most_len for row in rows)
        ids, total_len = self.ledger.ids[slot_ids, :most_len], self.ledger.total_len[slot_ids]
        drafts, found = lookup(ids, total_len, self.min_n, self.max_n, most_room)
        self.ledger.set_drafts(slot_ids, drafts, room * found)

    def propose_fed(
        self, bucket: Bucket, fed: Fed, batch: Batch, hidden: torch.Tensor, rules: list[Group]
    ) -> None:
        """The same in a step of fixed sizes, over whole lines of the ledger."""
        if bucket.passes:
            ledger = self.ledger
            ids, total_len = ledger.ids[fed.slot], ledger.total_len[fed.slot]
            drafts, found = lookup(ids, total_len, self.min_n, self.max_n, bucket.passes)
            ledger.set_drafts(fed.slot, drafts, fed.room * found)
