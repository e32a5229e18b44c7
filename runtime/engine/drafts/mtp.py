"""Multi-token prediction: one trained head, iterated.

The head reads pairs (x_p, h_{p-1}): a token and the trunk's hidden state before it, after the final norm.
The pair of token p has its key and value at place p of the request's pages, so what a page holds depends on
its own tokens only. Place 0 has no pair: the head's attention begins at 1.

A step's tokens p bring the pairs p + 1: their hidden states are at hand, and the next tokens are in the
ledger by then. Pairs behind a rejected draft are wrong; the next step overwrites them. Some pairs are owed by
earlier steps: the one of the first token behind a prefix hit; and, where drafting does not pay, those of
rows without drafts, which are read a chunk at a time, and before a page is finished. The hidden states for
these are kept in the slot: of the last tokens, by position. A snapshot keeps the state before its edge.
"""

import numpy as np
import torch

from hemiola.plugins.gpu.pairs import cuda as kernels
from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.session import Computed, Drafter
from hemiola.runtime.device.transfer import upload, upload_ints
from hemiola.runtime.engine.bucket import Bucket, Fed, counts_of, head_rows
from hemiola.runtime.engine.feed import ragged
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.sampling import choose, takes_more_than_best, widened
from hemiola.runtime.engine.step import Batch, Plan, Row

FIRST, NUM_TOKENS, _, SLOT, COMMITTED, *_ = range(len(COLUMNS))


class MtpProposer:
    """Greedy requests get the head's best tokens, others are drawn with the noise that the trunk will use."""

    def __init__(
        self,
        session: Drafter,
        hidden_ring: torch.Tensor,
        pages: PagePool,
        ledger: Ledger,
        vocab_size: int,
    ) -> None:
        self._session = session
        self._vocab_size = vocab_size
        self._ring = hidden_ring  # [S, R, F]
        self._pages = pages
        self._ledger = ledger
        self.launches = ledger.device.type == "cuda"  # kernels, in steps of fixed sizes
        self._passes = None
        if ledger.device.type == "cpu":
            from hemiola.runtime.engine.drafts.mtp_compiled import Passes  # numba is not needed elsewhere

            self._passes = Passes(session, hidden_ring, pages, ledger, vocab_size)

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        if self._passes is not None:
            self._passes.propose(plan, batch, hidden)
        else:
            self.propose_anywhere(plan, batch, hidden)

    def propose_anywhere(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        """The same on any device."""
        asked = [n for n, row in enumerate(plan.rows) if row.snapshot_slot]
        reading = [n for n, row in enumerate(plan.rows) if row.reads]
        rows = [plan.rows[n] for n in reading]
        owed, counts = counts_of(rows)
        at, offset = ragged(counts)
        starts = np.cumsum(counts) - counts
        wanting = [at for at, row in enumerate(rows) if row.room > 0]
        slots = [row.slot_id for row in rows]
        kept, kept_row = self._last_tokens(plan.rows)
        made = upload(
            self._ledger.device,
            *(np.array(asked, np.int64), kept, kept_row, np.array(reading, np.int64)[at]),
            *(offset + 1 - owed[at], np.array(reading, np.int64)[wanting], (starts + owed)[wanting]),
            *(head_rows(slots, counts), self._pages.table[slots]),
        )
        asked_rows, kept, kept_row, pair_row, offset, wanted, last, fed_rows, page_table = made
        before = self._hidden_before(pair_row, offset, batch, hidden) if rows else hidden
        if asked:
            self._keep_for_snapshots(batch.rows[asked_rows], hidden)
        self._keep(batch.slots[kept_row], batch.positions[kept], hidden.index_select(0, kept))
        if not rows:
            return
        committed = batch.rows[:, COMMITTED].to(torch.int64)
        own = batch.slots[wanted]
        last = last + self._ledger.committed_len[own] - committed[wanted] - 1
        places = committed[pair_row] + offset
        read = self._read(fed_rows, page_table, batch.slots[pair_row], places, before, last)
        self._draft([rows[at] for at in wanting], own, read)

    def _last_tokens(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """The last tokens of each row, as many as a ring holds: of the step, and whose."""
        num_tokens = np.array([row.num_tokens for row in rows])
        kept = np.minimum(num_tokens, self._ring.shape[1])
        row, offset = ragged(kept)
        return (np.cumsum(num_tokens) - kept)[row] + offset, row

    def _draft(self, rows: list[Row], slot_id: torch.Tensor, read: Computed) -> None:
        """The first draft of each row from what was read, the others from pairs of a draft and its state."""
        ledger, states = self._ledger, read.hidden
        ledger.num_drafts[slot_id] = upload_ints(ledger.device, [row.room for row in rows])
        for at in range(max((row.room for row in rows), default=0)):
            if at > 0:
                going_on = [n for n, row in enumerate(rows) if row.room > at]
                rows = [rows[n] for n in going_on]
                slots = [row.slot_id for row in rows]
                more, fed_rows, page_table = upload(
                    ledger.device,
                    np.array(going_on, np.int64),
                    head_rows(slots, np.ones(len(rows), np.int64)),
                    self._pages.table[slots],
                )
                slot_id, states = slot_id[more], states[more]
                places = ledger.total_len[slot_id] + at - 1
                lines = torch.arange(len(rows), device=ledger.device)
                read = self._read(fed_rows, page_table, slot_id, places, states, lines)
                states = read.hidden
            self._write(slot_id, at, read, [row.request.rule for row in rows])

    def _write(self, slot_id: torch.Tensor, at: int, read: Computed, rules: list[Rule] | list[Group]) -> None:
        """Draft number `at` of these slots."""
        chosen = self._chosen(slot_id, at, read, rules)
        self._ledger.ids[slot_id, self._ledger.total_len[slot_id] + at] = chosen.to(torch.int32)

    def _chosen(
        self, slot_id: torch.Tensor, at: int, read: Computed, rules: list[Rule] | list[Group]
    ) -> torch.Tensor:
        """Draft number `at` of these slots, [N] int64."""
        if not takes_more_than_best(rules):
            best = read.best
            return read.logits.argmax(-1) if best is None else best.token_id
        logits = widened(read.logits, self._vocab_size)
        return choose(logits, rules, slot_id, self._ledger.total_len[slot_id] + at, self._ledger.ids)

    def propose_fed(
        self, bucket: Bucket, fed: Fed, batch: Batch, hidden: torch.Tensor, rules: list[Group]
    ) -> None:
        """The same in a step of fixed sizes: rows that read or draft nothing are padding for the head."""
        if self.launches:
            self._propose_launched(bucket, fed, batch, hidden, rules)
            return
        ledger = self._ledger
        before = self._hidden_before(fed.pair_row, fed.pair_offset, batch, hidden) if bucket.pairs else hidden
        self._keep_for_snapshots(batch.rows, hidden)
        self._keep(fed.token_slot, batch.positions, hidden)
        if not bucket.pairs:
            return
        committed = batch.rows[:, COMMITTED].to(torch.int64)
        last = (fed.last + ledger.committed_len[fed.slot] - committed - 1).clamp(min=0)
        places = committed[fed.pair_row] + fed.pair_offset
        table = batch.page_table
        read = self._read(fed.head_rows, table, fed.pair_slot, places, before, last)
        ledger.num_drafts[fed.slot] = fed.room
        lines = torch.arange(bucket.rows, device=ledger.device)
        fed_rows = torch.zeros_like(batch.rows)
        fed_rows[:, FIRST] = lines
        fed_rows[:, NUM_TOKENS].fill_(1)
        for at in range(bucket.passes):
            if at > 0:
                active = fed.room > at
                slot_id = torch.where(active, fed.slot, 0)
                places = torch.where(active, ledger.total_len[fed.slot] + at - 1, 0)
                fed_rows[:, SLOT] = slot_id
                read = self._read(fed_rows, table, slot_id, places, read.hidden, lines)
            self._write(fed.slot, at, read, rules)

    def _propose_launched(
        self, bucket: Bucket, fed: Fed, batch: Batch, hidden: torch.Tensor, rules: list[Group]
    ) -> None:
        """The same numbers, in a launch of a kernel for each part."""
        lengths, ids = self._ledger.lengths, self._ledger.ids
        own = (fed.pair_row, fed.pair_offset)
        states = kernels.states_before(*own, batch.rows, lengths, hidden, self._ring)
        kernels.keep(fed.token_slot, batch.positions, hidden, self._ring)
        if not bucket.pairs:
            return
        of_rows = (batch.rows, fed.slot, fed.room, fed.last, fed.head_rows)
        wanted, token_ids, positions = kernels.first_pairs(*of_rows, *own, fed.pair_slot, lengths, ids)
        rows = fed.head_rows
        for at in range(max(bucket.passes, 1)):  # pairs are read by who drafts nothing, too
            read = self._session.draft(
                token_ids=token_ids,
                hidden=states,
                positions=positions,
                rows=rows,
                page_table=batch.page_table,
                logits_ids=wanted,
            )
            if at == bucket.passes:
                return
            chosen = self._chosen(fed.slot, at, read, rules)
            rows, token_ids, positions = kernels.next_pairs(chosen, fed.slot, fed.room, lengths, ids, at)
            states, wanted = read.hidden, batch.logits_ids[: bucket.rows]

    def _hidden_before(
        self, row: torch.Tensor, offset: torch.Tensor, batch: Batch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """h_{p-1} of every pair: of this step, but for owed ones (offset < 1), for which the slot has it."""
        rows = batch.rows[row]
        tokens = (rows[:, FIRST] + offset - 1).clamp(min=0)
        places = (rows[:, COMMITTED] + offset - 1) % self._ring.shape[1]
        is_owed = (offset < 1).unsqueeze(1)
        return torch.where(is_owed, self._ring[rows[:, SLOT], places], hidden.index_select(0, tokens))

    def _keep_for_snapshots(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """The state before the edge of each snapshot that this step took; before the ring is overwritten."""
        first, _, _, slot_id, committed, edge, snapshot_slot, snapshot_edge = rows.T
        last = snapshot_edge - 1
        place = last % self._ring.shape[1]
        token = (first + last - committed).clamp(0, len(hidden) - 1)
        is_new = (last >= committed).unsqueeze(1)
        kept = torch.where(is_new, hidden[token], self._ring[slot_id, place])
        passed = (edge <= last) & (last < self._ledger.edge[slot_id])
        target = torch.where(passed, snapshot_slot, 0)  # else it goes to the dump slot
        self._ring[target, place] = kept

    def _keep(self, slot_id: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        """Put the hidden states of these tokens into their slots' rings."""
        self._ring[slot_id, positions % self._ring.shape[1]] = hidden

    def _read(
        self,
        rows: torch.Tensor,  # [N, 8], without `committed`
        page_table: torch.Tensor,  # [N, W]
        slot_id: torch.Tensor,  # [P] of the pairs
        places: torch.Tensor,  # [P]
        before: torch.Tensor,  # [P, F]
        last: torch.Tensor,  # pairs whose outcome is wanted
    ) -> Computed:
        """Run the head over pairs; what it finds of the last ones."""
        rows[:, COMMITTED] = places.index_select(0, rows[:, FIRST])
        return self._session.draft(
            token_ids=self._ledger.ids[slot_id, places],
            hidden=before,
            positions=places.to(torch.int32),
            rows=rows,
            page_table=page_table,
            logits_ids=last.to(torch.int32),
        )
