"""A step as the engine reads it: what the host planned, joined with what only the ledger knows."""

import numpy as np
import torch

from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.step import Batch, Choices, Plan


class Feed:
    """Turns plans into batches. Every tensor is made afresh: steps in flight share nothing."""

    def __init__(self, pages: PagePool, ledger: Ledger) -> None:
        self.pages = pages
        self.ledger = ledger

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan."""
        columns = [
            (r.num_tokens, r.num_drafts, r.slot_id, r.snapshot_slot, r.snapshot_edge) for r in plan.rows
        ]
        num_tokens, num_drafts, slots, snapshot_slot, snapshot_edge = np.array(columns, np.int32).T
        ends = np.cumsum(num_tokens)
        row, offset = ragged(num_tokens)
        slot_id = torch.from_numpy(slots.astype(np.int64))
        committed = self.ledger.committed_len[slot_id]
        positions = committed[torch.from_numpy(row)] + torch.from_numpy(offset)
        final_len = committed + torch.from_numpy((num_tokens - num_drafts).astype(np.int64))
        logits_ids, choices = _choices(plan, ends)
        edge = self.ledger.edge[slot_id]
        known = (ends - num_tokens, num_tokens, num_drafts, slots, committed, edge)
        known += (snapshot_slot, snapshot_edge)
        return Batch(
            rows=torch.from_numpy(np.stack([np.asarray(column, np.int32) for column in known], axis=1)),
            logits_ids=torch.from_numpy(logits_ids),
            page_table=torch.from_numpy(self.pages.table[slots]),
            token_ids=self.ledger.ids[slot_id[torch.from_numpy(row)], positions],
            positions=positions.to(torch.int32),
            slots=slot_id,
            final_len=final_len,
            choices=choices,
        )


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows of so many items each: every item's row, and its place in that row."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def _choices(plan: Plan, ends: np.ndarray) -> tuple[np.ndarray, Choices]:
    """Which tokens' logits are wanted, and which rows choose by them."""
    rows = [n for n, row in enumerate(plan.rows) if row.chooses]
    num_drafts = np.array([plan.rows[n].num_drafts for n in rows], np.int64)
    num_lines = num_drafts + 1
    row, offset = ragged(num_lines)
    ends = ends[rows]
    rules = [plan.rows[n].request.rule for n in rows]
    choices = Choices(
        rows=rows,
        num_lines=num_lines.tolist(),
        slot_id=torch.tensor([plan.rows[n].slot_id for n in rows], dtype=torch.int64),
        num_drafts=torch.from_numpy(num_drafts),
        row=torch.from_numpy(row),
        offset=torch.from_numpy(offset),
        rules=[rule for rule, num in zip(rules, num_lines.tolist(), strict=True) for _ in range(num)],
    )
    return ((ends - num_lines)[row] + offset).astype(np.int32), choices
