"""What an MTP head needs around its passes on a CPU, compiled: a call or two each, with mtp.py's numbers."""

from collections.abc import Sequence

import numpy as np
import torch

from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import get_int, get_long, put_int, put_long
from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.session import Computed, Drafter
from hemiola.runtime.engine.compiled import best_of
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.sampling import choose, takes_more_than_best, widened
from hemiola.runtime.engine.step import Batch, Plan, Row

WIDTH = len(COLUMNS)
FIRST, NUM_TOKENS, _, SLOT, COMMITTED, EDGE, SNAPSHOT_SLOT, SNAPSHOT_EDGE = range(WIDTH)


class Passes:
    """The head's passes of a step."""

    def __init__(
        self, session: Drafter, ring: torch.Tensor, pages: PagePool, ledger: Ledger, vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._session, self._ring, self._pages, self._ledger = session, ring, pages, ledger
        self._ring_len, self._width = ring.shape[1:]

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        """MtpProposer.propose"""
        reading = [(n, row.owed, row.room > 0) for n, row in enumerate(plan.rows) if row.reads]
        rows = [plan.rows[n] for n, *_ in reading]
        hidden = hidden.contiguous()
        first = self._first_pass(batch, hidden, reading, rows) if rows else None
        ring = (self._ring, self._ring_len, self._width)
        cost = 0.1 * hidden.numel()
        _keep(len(plan.rows), cost, batch.rows, self._ledger.edge, hidden, *ring)  # what pairs have read
        if first is not None:
            self._draft([row for row in rows if row.room > 0], *first)

    def _first_pass(
        self, batch: Batch, hidden: torch.Tensor, reading: list[tuple[int, int, bool]], rows: list[Row]
    ) -> "tuple[_Inputs, torch.Tensor]":
        """Inputs of the pairs of these rows, and which of them bring drafts."""
        num_pairs = sum(row.num_tokens + row.owed for row in rows)
        inputs = _Inputs(self._width, num_pairs, [row.slot_id for row in rows], self._pages)
        wanted = torch.empty(sum(wants for *_, wants in reading), dtype=torch.int32)
        ledger, asked = self._ledger, torch.tensor(reading, dtype=torch.int64)
        known = (batch.rows, hidden, self._ring, self._ring_len, self._width)
        lengths = (ledger.ids, ledger.ids.shape[1], ledger.committed_len)
        _pairs(1, 0.0, len(rows), asked, *known, *lengths, *inputs.written, wanted)
        return inputs, wanted

    def _draft(self, rows: list[Row], inputs: "_Inputs", lines: torch.Tensor) -> None:
        """The first draft of each row from its last pair, the others from pairs of a draft and its state."""
        ledger, states = self._ledger, inputs.before
        slots = torch.tensor([row.slot_id for row in rows], dtype=torch.int64)
        room = torch.tensor([row.room for row in rows], dtype=torch.int64)
        known = (ledger.ids, ledger.ids.shape[1], ledger.total_len)
        for at in range(max((row.room for row in rows), default=0) or 1):
            if at > 0:
                going_on = [n for n, row in enumerate(rows) if row.room > at]
                rows = [rows[n] for n in going_on]
                which, slots = torch.tensor(going_on, dtype=torch.int32), slots[going_on]
                inputs = _Inputs(self._width, len(rows), [row.slot_id for row in rows], self._pages)
                _again(1, 0.0, len(rows), at, which, slots, states, self._width, *known, *inputs.written)
                lines = torch.arange(len(rows), dtype=torch.int32)
            logits, states = self._run(inputs, lines)
            states = states.contiguous()
            self._write(rows, slots, room, at, logits)

    def _run(self, inputs: "_Inputs", lines: torch.Tensor) -> Computed:
        return self._session.draft(
            token_ids=inputs.token_ids,
            hidden=inputs.before,
            positions=inputs.positions,
            rows=inputs.rows,
            page_table=inputs.page_table,
            logits_ids=lines,
        )

    def _write(
        self, rows: Sequence[Row], slots: torch.Tensor, room: torch.Tensor, at: int, logits: torch.Tensor
    ) -> None:
        """Draft number `at` of these slots; with the first, how many there will be."""
        ledger, rules = self._ledger, [row.request.rule for row in rows]
        num, chosen = logits.shape[1], torch.empty(0, dtype=torch.int64)
        if takes_more_than_best(rules):
            logits = widened(logits, self._vocab_size)
            chosen = choose(logits, rules, slots, ledger.total_len[slots] + at, ledger.ids)
        where = (slots, room, ledger.ids, ledger.ids.shape[1], ledger.total_len, ledger.num_drafts)
        cost = 0.15 * logits.numel()
        _write(len(rows), cost, at, num, logits.contiguous(), chosen, len(chosen), *where)


class _Inputs:
    """What the head is called with for P pairs of N rows."""

    def __init__(self, width: int, num_pairs: int, slots: list[int], pages: PagePool) -> None:
        self.token_ids, self.positions = torch.empty(2, num_pairs, dtype=torch.int32).unbind()
        self.before = torch.empty(num_pairs, width)
        self.rows = torch.zeros(len(slots), WIDTH, dtype=torch.int32)
        self.page_table = torch.from_numpy(pages.table[np.array(slots)])

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.positions, self.rows, self.before


@helper
def _row(rows, n, first, num, slot, place):
    """Line n of the head's rows."""
    put_int(rows, n * WIDTH + FIRST, first)
    put_int(rows, n * WIDTH + NUM_TOKENS, num)
    put_int(rows, n * WIDTH + SLOT, slot)
    put_int(rows, n * WIDTH + COMMITTED, place)


@Kernel
def _pairs(
    item, scratch, num_reading, asked, rows, hidden, ring, ring_len, width, ids, ids_len, committed_len,
    token_ids, positions, fed, before, wanted,
):  # fmt: skip
    """One item. asked [num_reading, 3]: the row of the step, pairs that are owed, whether drafts are wanted.

    The pair behind a row's token has offset 1; up to 0 they are owed, and their states stand in the ring.
    """
    pair, wanting = 0, 0
    for r in range(num_reading):
        n, owed = get_long(asked, 3 * r), get_long(asked, 3 * r + 1)
        first, num = get_int(rows, n * WIDTH + FIRST), get_int(rows, n * WIDTH + NUM_TOKENS)
        slot, committed = get_int(rows, n * WIDTH + SLOT), get_int(rows, n * WIDTH + COMMITTED)
        _row(fed, r, pair, num + owed, slot, committed + 1 - owed)
        if get_long(asked, 3 * r + 2) != 0:
            put_int(wanted, wanting, pair + owed + get_long(committed_len, slot) - committed - 1)
            wanting += 1
        for offset in range(1 - owed, num + 1):
            place = committed + offset
            put_int(token_ids, pair, get_int(ids, slot * ids_len + place))
            put_int(positions, pair, place)
            if offset < 1:
                move(ring, (slot * ring_len + (place - 1) % ring_len) * width, before, pair * width, width)
            else:
                move(hidden, (first + offset - 1) * width, before, pair * width, width)
            pair += 1


@Kernel
def _keep(n, scratch, rows, edges, hidden, ring, ring_len, width):
    """An item is a row: its snapshot takes the state before its edge, then the ring those of new tokens."""
    at = n * WIDTH
    first, num = get_int(rows, at + FIRST), get_int(rows, at + NUM_TOKENS)
    slot, committed = get_int(rows, at + SLOT), get_int(rows, at + COMMITTED)
    target, last = get_int(rows, at + SNAPSHOT_SLOT), get_int(rows, at + SNAPSHOT_EDGE) - 1
    if target > 0 and get_int(rows, at + EDGE) <= last and last < get_long(edges, slot):
        place = (target * ring_len + last % ring_len) * width
        if last >= committed:
            move(hidden, (first + last - committed) * width, ring, place, width)
        else:
            move(ring, (slot * ring_len + last % ring_len) * width, ring, place, width)
    for i in range(max(0, num - ring_len), num):
        move(hidden, (first + i) * width, ring, (slot * ring_len + (committed + i) % ring_len) * width, width)


@Kernel
def _again(
    item, scratch, num_rows, at, which, slots, states, width, ids, ids_len, total_len,
    token_ids, positions, fed, before,
):  # fmt: skip
    """One item: the pairs of the last draft of each slot and the state that it came from."""
    for n in range(num_rows):
        slot = get_long(slots, n)
        place = get_long(total_len, slot) + at - 1
        _row(fed, n, n, 1, slot, place)
        put_int(token_ids, n, get_int(ids, slot * ids_len + place))
        put_int(positions, n, place)
        move(states, get_int(which, n) * width, before, n * width, width)


@Kernel
def _write(
    line,
    scratch,
    at,
    vocab_size,
    logits,
    chosen,
    num_chosen,
    slots,
    room,
    ids,
    ids_len,
    total_len,
    num_drafts,
):
    """An item is a line of logits: its best token, or the one that was chosen, becomes a draft."""
    slot = get_long(slots, line)
    token = get_long(chosen, line) if num_chosen > 0 else best_of(logits + 4 * line * vocab_size, vocab_size)
    put_int(ids, slot * ids_len + get_long(total_len, slot) + at, token)
    if at == 0:
        put_long(num_drafts, slot, get_long(room, line))
