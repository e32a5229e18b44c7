"""A step as the engine reads it: what the host planned, joined with what only the ledger knows."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Batch, Choices, Masks, Plan, Row, asked_of

COMMITTED, EDGE = COLUMNS.index("committed"), COLUMNS.index("edge")


class Feed:
    """Turns plans into batches. Every tensor is made afresh: steps in flight share nothing."""

    def __init__(self, pages: PagePool, ledger: Ledger) -> None:
        self.pages = pages
        self.ledger = ledger

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan."""
        if self.ledger.device.type == "cpu":
            from hemiola.runtime.engine import compiled  # numba is not needed elsewhere

            return compiled.fill(plan, self.pages.table, self.ledger)
        return self.fill_anywhere(plan)

    def fill_anywhere(self, plan: Plan) -> Batch:
        """The same on any device."""
        known = known_of(plan.rows)
        num_tokens, num_drafts, slots = known[:, 1:4].astype(np.int64).T
        ends = np.cumsum(num_tokens)
        choosing = _Choosing.of(plan, ends)
        rows, slot_id, final_len, row, offset, page_table, logits_ids, *chosen = upload(
            self.ledger.device,
            *(known, slots, num_tokens - num_drafts, *ragged(num_tokens), self.pages.table[slots]),
            *choosing.arrays,
        )
        choices = choosing.on_device(*chosen)
        batch = joined(self.ledger, rows, slot_id, row, offset, final_len, page_table, logits_ids, choices)
        return replace(batch, masks=Masks.of(plan, self.ledger.device))


def known_of(rows: list[Row]) -> np.ndarray:
    """The columns of plugins/rows.py [N, 8], but for what only the ledger knows."""
    columns = [
        (0, r.num_tokens, r.num_drafts, r.slot_id, 0, 0, r.snapshot_slot, r.snapshot_edge) for r in rows
    ]
    known = np.array(columns, np.int32)
    known[:, 0] = np.cumsum(known[:, 1]) - known[:, 1]
    return known


def joined(
    ledger: Ledger,
    rows: torch.Tensor,  # [N, 8]
    slot_id: torch.Tensor,  # [N] int64
    row: torch.Tensor,  # [T] int64, whose token
    offset: torch.Tensor,  # [T] int64, which of that row's
    final_len: torch.Tensor | int,  # [N] tokens that are no drafts
    page_table: torch.Tensor,
    logits_ids: torch.Tensor,
    choices: Choices,
) -> Batch:
    """What the host knows of a step, with what the ledger knows."""
    committed = ledger.committed_len[slot_id]
    positions = committed[row] + offset
    rows[:, COMMITTED], rows[:, EDGE] = committed, ledger.edge[slot_id]
    return Batch(
        rows=rows,
        logits_ids=logits_ids,
        page_table=page_table,
        token_ids=ledger.ids[slot_id[row], positions],
        positions=positions.to(torch.int32),
        slots=slot_id,
        final_len=committed + final_len,
        choices=choices,
    )


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows of so many items each: every item's row, and its place in that row."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


class _Choosing(NamedTuple):
    """Which tokens' logits are wanted, and which rows choose by them; Choices, still on the host."""

    rows: list[int]
    num_lines: list[int]  # of each row
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
        width = max(self.num_lines, default=1)
        return Choices(
            rows=self.rows,
            width=width,
            dense=len(self.rules) == len(self.rows) * width,
            slot_id=slot_id,
            num_drafts=num_drafts,
            row=row,
            offset=offset,
            rules=self.rules,
            asked=asked_of(self.rows, self.num_lines, self.rules),
        )
