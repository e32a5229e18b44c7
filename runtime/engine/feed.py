"""A step as the engine reads it: what the host planned, joined with what only the ledger knows."""

from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Batch, Choices, Plan

COMMITTED, EDGE = COLUMNS.index("committed"), COLUMNS.index("edge")


class Feed:
    """Turns plans into batches. Every tensor is made afresh: steps in flight share nothing."""

    def __init__(self, pages: PagePool, ledger: Ledger) -> None:
        self.pages = pages
        self.ledger = ledger

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan."""
        columns = [
            (0, r.num_tokens, r.num_drafts, r.slot_id, 0, 0, r.snapshot_slot, r.snapshot_edge)
            for r in plan.rows
        ]
        known = np.array(columns, np.int32)
        num_tokens, num_drafts, slots = known[:, 1:4].astype(np.int64).T
        ends = np.cumsum(num_tokens)
        known[:, 0] = ends - num_tokens
        choosing = _Choosing.of(plan, ends)
        rows, slot_id, final_len, row, offset, page_table, logits_ids, *chosen = upload(
            self.ledger.device,
            *(known, slots, num_tokens - num_drafts, *ragged(num_tokens), self.pages.table[slots]),
            *choosing.arrays,
        )
        committed = self.ledger.committed_len[slot_id]
        positions = committed[row] + offset
        rows[:, COMMITTED], rows[:, EDGE] = committed, self.ledger.edge[slot_id]
        return Batch(
            rows=rows,
            logits_ids=logits_ids,
            page_table=page_table,
            token_ids=self.ledger.ids[slot_id[row], positions],
            positions=positions.to(torch.int32),
            slots=slot_id,
            final_len=committed + final_len,
            choices=choosing.on_device(*chosen),
        )


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows of so many items each: every item's row, and its place in that row."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


class _Choosing(NamedTuple):
    """Which tokens' logits are wanted, and which rows choose by them; Choices, still on the host."""

    rows: list[int]
    num_lines: list[int]
    arrays: tuple[np.ndarray, ...]  # logits_ids; then slot_id, num_drafts, row and offset of Choices
    rules: list[Rule]

    @staticmethod
    def of(plan: Plan, ends: np.ndarray) -> "_Choosing":
        rows = [n for n, row in enumerate(plan.rows) if row.chooses]
        num_drafts = np.array([plan.rows[n].num_drafts for n in rows], np.int64)
        num_lines = num_drafts + 1
        row, offset = ragged(num_lines)
        slot_id = np.array([plan.rows[n].slot_id for n in rows], np.int64)
        logits_ids = ((ends[rows] - num_lines)[row] + offset).astype(np.int32)
        lines = num_lines.tolist()
        rules = [plan.rows[n].request.rule for n, num in zip(rows, lines, strict=True) for _ in range(num)]
        return _Choosing(rows, lines, (logits_ids, slot_id, num_drafts, row, offset), rules)

    def on_device(
        self, slot_id: torch.Tensor, num_drafts: torch.Tensor, row: torch.Tensor, offset: torch.Tensor
    ) -> Choices:
        return Choices(self.rows, self.num_lines, slot_id, num_drafts, row, offset, self.rules)
