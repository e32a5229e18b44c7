"""Multi-token prediction: one trained head, iterated.

The head reads pairs (x_p, h_{p-1}): a token and the trunk's hidden state before it, after the final norm.
The pair of token p has its key and value at place p of the request's pages, so what a page holds depends on
its own tokens only. Place 0 has no pair: the head's attention begins at 1.

A step's tokens p bring the pairs p + 1: their hidden states are at hand, and the next tokens are in the
ledger by then. Pairs behind a rejected draft are wrong; the next step overwrites them. Some pairs are owed by
earlier steps: the one of the first token behind a prefix hit; and, where drafting does not pay, those of
rows without drafts, which are read together before a page is finished. The hidden states for these are kept
in the slot: of the last tokens, by position. A snapshot keeps the state before its edge.
"""

from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.session import Drafter
from hemiola.runtime.device.transfer import upload, upload_ints
from hemiola.runtime.engine.feed import ragged
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.sampling import choose
from hemiola.runtime.engine.step import Batch, Plan, Row

HIDDEN = "mtp.hidden"  # the slot state [R, F]
FIRST, NUM_TOKENS, _, SLOT, COMMITTED, *_ = range(len(COLUMNS))


class _Pairs(NamedTuple):
    """The pairs of a step, row by row."""

    row: torch.Tensor  # [P] of the batch
    offset: torch.Tensor  # [P] behind the row's first token; up to 0 they are owed
    counts: np.ndarray  # pairs of each row that reads
    owed: torch.Tensor  # which of the P


class MtpProposer:
    """Greedy requests get the head's best tokens, others are drawn with the noise that the trunk will use."""

    def __init__(self, session: Drafter, hidden_ring: torch.Tensor, pages: PagePool, ledger: Ledger) -> None:
        self._session = session
        self._ring = hidden_ring  # [S, R, F]
        self._pages = pages
        self._ledger = ledger

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        reading = [n for n, row in enumerate(plan.rows) if row.reads]
        pairs = self._pairs(plan.rows, reading)
        before = self._hidden_before(pairs, batch, hidden)
        self._keep_for_snapshots(plan.rows, batch, hidden)
        self._keep(plan.rows, batch, hidden)
        if not reading:
            return
        committed = batch.rows[:, COMMITTED].to(torch.int64)
        wanting = [at for at, n in enumerate(reading) if plan.rows[n].room > 0]
        rows = [plan.rows[reading[at]] for at in wanting]
        starts = (np.cumsum(pairs.counts) - pairs.counts)[wanting] + [row.owed for row in rows]
        wanted, starts = upload(
            self._ledger.device, np.array(reading, np.int64)[wanting], starts.astype(np.int64)
        )
        own = batch.slots[wanted]
        last = starts + self._ledger.committed_len[own] - committed[wanted] - 1
        places = committed[pairs.row] + pairs.offset
        slots = [plan.rows[n].slot_id for n in reading]
        logits, states = self._read(slots, batch.slots[pairs.row], places, pairs.counts, before, last)
        self._draft(rows, own, logits, states)

    def _pairs(self, rows: list[Row], reading: list[int]) -> _Pairs:
        """One behind every token of the rows that read, and before them those that are owed."""
        owed = np.array([rows[n].owed for n in reading], np.int64)
        counts = np.array([rows[n].num_tokens for n in reading], np.int64) + owed
        at, offset = ragged(counts)
        offset += 1 - owed[at]
        row = np.array(reading, np.int64)[at]
        there = upload(self._ledger.device, row, offset, np.flatnonzero(offset < 1))
        return _Pairs(there[0], there[1], counts, there[2])

    def _draft(
        self, rows: list[Row], slot_id: torch.Tensor, logits: torch.Tensor, states: torch.Tensor
    ) -> None:
        """The first draft of each row from these logits, the others from pairs of a draft and its state."""
        ledger = self._ledger
        ledger.num_drafts[slot_id] = upload_ints(ledger.device, [row.room for row in rows])
        for at in range(max((row.room for row in rows), default=0)):
            if at > 0:
                going_on = [n for n, row in enumerate(rows) if row.room > at]
                more = upload_ints(ledger.device, going_on)
                rows, slot_id = [rows[n] for n in going_on], slot_id[more]
                places = ledger.total_len[slot_id] + at - 1
                slots, ones = [row.slot_id for row in rows], np.ones(len(rows), np.int64)
                lines = torch.arange(len(rows), device=ledger.device)
                logits, states = self._read(slots, slot_id, places, ones, states[more], lines)
            places = ledger.total_len[slot_id] + at
            rules = [row.request.rule for row in rows]
            chosen = choose(logits, rules, slot_id, places, ledger.ids)
            ledger.ids[slot_id, places] = chosen.to(torch.int32)

    def _hidden_before(self, pairs: _Pairs, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """h_{p-1} of every pair: of this step, but for owed ones, for which the slot has it."""
        tokens = batch.rows[pairs.row, FIRST] + pairs.offset - 1
        tokens.index_fill_(0, pairs.owed, 0)
        before = hidden.index_select(0, tokens)
        rows = batch.rows[pairs.row[pairs.owed]]
        places = (rows[:, COMMITTED] + pairs.offset[pairs.owed] - 1) % self._ring.shape[1]
        before[pairs.owed] = self._ring[rows[:, SLOT], places]
        return before

    def _keep_for_snapshots(self, rows: list[Row], batch: Batch, hidden: torch.Tensor) -> None:
        """The state before the edge of each snapshot that this step took; before the ring is overwritten."""
        asked = [n for n, row in enumerate(rows) if row.snapshot_slot]
        if not asked:
            return
        own = batch.rows[upload_ints(self._ledger.device, asked)]
        first, _, _, slot_id, committed, edge, snapshot_slot, snapshot_edge = own.T
        last = snapshot_edge - 1
        place = last % self._ring.shape[1]
        token = (first + last - committed).clamp(0, len(hidden) - 1)
        is_new = (last >= committed).unsqueeze(1)
        kept = torch.where(is_new, hidden[token], self._ring[slot_id, place])
        passed = (edge <= last) & (last < self._ledger.edge[slot_id])
        target = torch.where(passed, snapshot_slot, 0)  # else it goes to the dump slot
        self._ring[target, place] = kept

    def _keep(self, rows: list[Row], batch: Batch, hidden: torch.Tensor) -> None:
        """Put the hidden states of the last tokens into the slots' rings."""
        ring_len = self._ring.shape[1]
        num_tokens = np.array([row.num_tokens for row in rows])
        kept = np.minimum(num_tokens, ring_len)
        row, offset = ragged(kept)
        token = (np.cumsum(num_tokens) - kept)[row] + offset
        owner, tokens = upload(self._ledger.device, row, token)
        self._ring[batch.slots[owner], batch.positions[tokens] % ring_len] = hidden.index_select(0, tokens)

    def _read(
        self,
        slots: list[int],  # [N] of the rows
        slot_id: torch.Tensor,  # [P] of the pairs
        places: torch.Tensor,  # [P]
        counts: np.ndarray,  # [N] pairs of each row
        before: torch.Tensor,  # [P, F]
        last: torch.Tensor,  # pairs whose outcome is wanted
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over pairs; logits and hidden states of the last ones."""
        rows = np.zeros((len(counts), len(COLUMNS)), np.int32)
        rows[:, FIRST] = np.cumsum(counts) - counts
        rows[:, NUM_TOKENS] = counts
        rows[:, SLOT] = slots
        fed, page_table = upload(self._ledger.device, rows, self._pages.table[slots])
        fed[:, COMMITTED] = places.index_select(0, fed[:, FIRST])
        logits, states = self._session.draft(
            token_ids=self._ledger.ids[slot_id, places],
            hidden=before,
            positions=places.to(torch.int32),
            rows=fed,
            page_table=page_table,
            logits_ids=last.to(torch.int32),
        )
        return logits, states[last]
