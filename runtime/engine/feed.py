"""A step as the engine reads it: what the host planned, joined with what only the ledger knows."""

import numpy as np
import torch

from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.config import Resolved
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.step import Batch, Choices, Plan


def tokens_width(config: Resolved) -> int:
    """T at most, padding included."""
    return -(-config.max_step_tokens // config.pad_tokens) * config.pad_tokens


def rows_width(config: Resolved) -> int:
    """N at most: every running request, and the dump row that holds the padding."""
    return config.max_rows + 1


def logits_width(config: Resolved) -> int:
    """L at most: a row's drafts and the token after them."""
    return config.max_rows * (1 + config.num_drafts)


def table_width(config: Resolved) -> int:
    """W: pages of the longest request."""
    return -(-config.max_len // config.page_len)


class Feed:
    """Turns plans into batches. Every tensor is made afresh: steps in flight share nothing."""

    def __init__(self, config: Resolved, pages: PagePool, ledger: Ledger) -> None:
        self.config = config
        self.pages = pages
        self.ledger = ledger

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan; in exact numerics a dump row makes the tokens a multiple of the tile."""
        rows = plan.rows
        table = np.array(
            [(r.num_tokens, r.num_drafts, r.slot_id, r.snapshot_slot, r.snapshot_edge) for r in rows],
            np.int32,
        )
        num_tokens = int(table[:, 0].sum())
        padding = -num_tokens % self.config.pad_tokens
        if padding:  # in slot 0 and page 0, where nothing is kept
            table = np.concatenate((table, np.array([[padding, 0, 0, 0, 0]], np.int32)))
        cu_tokens = np.zeros(len(table) + 1, np.int32)
        np.cumsum(table[:, 0], out=cu_tokens[1:])
        row, offset = ragged(table[:, 0])
        if padding:
            offset[num_tokens:] = 0  # all of its tokens stand at position 0
        slot_id = torch.from_numpy(table[:, 2].astype(np.int64))
        committed = self.ledger.committed_len[slot_id]
        positions = committed[torch.from_numpy(row)] + torch.from_numpy(offset)
        final_len = committed + torch.from_numpy((table[:, 0] - table[:, 1]).astype(np.int64))
        logits_ids, choices = _choices(plan, cu_tokens)
        return Batch(
            cu_tokens=torch.from_numpy(cu_tokens),
            num_drafts=_column(table, 1),
            logits_ids=torch.from_numpy(logits_ids),
            slot_id=_column(table, 2),
            snapshot_slot=_column(table, 3),
            snapshot_edge=_column(table, 4),
            page_table=torch.from_numpy(self.pages.table[table[:, 2]]),
            token_ids=self.ledger.ids[slot_id[torch.from_numpy(row)], positions],
            positions=positions.to(torch.int32),
            committed=committed.to(torch.int32),
            edge=self.ledger.edge[slot_id].to(torch.int32),
            slots=slot_id[: len(rows)],
            final_len=final_len[: len(rows)],
            choices=choices,
        )


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of so many items side by side: of each item its row, and its place in that."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def _column(table: np.ndarray, at: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table[:, at]))


def _choices(plan: Plan, cu_tokens: np.ndarray) -> tuple[np.ndarray, Choices]:
    """The logits that are wanted, and whose they are."""
    rows = [n for n, row in enumerate(plan.rows) if row.chooses]
    num_drafts = np.array([plan.rows[n].num_drafts for n in rows], np.int64)
    num_lines = num_drafts + 1
    row, offset = ragged(num_lines)
    ends = cu_tokens[[n + 1 for n in rows]]
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
