"""What an MTP head needs around its passes on a CPU, compiled: a call or two each, with mtp.py's numbers.

Written like compiled.py: at once on tensors, or as a part of a recorded step.
"""

from typing import Any, NamedTuple

import torch

from hemiola.plugins.cpu.code import Operand, code_of, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import get_int, get_long, put_int, put_long
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.session import Computed, Drafter
from hemiola.runtime.engine.compiled import (
    ASKED,
    COMMITTED,
    EDGE,
    FIRST,
    NUM_TOKENS,
    OWED,
    OWN,
    READS,
    ROOM,
    SLOT,
    SNAPSHOT_EDGE,
    SNAPSHOT_SLOT,
    WIDTH,
    Columns,
    all_asked,
    best_of,
)
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.sampling import choose, takes_more_than_best, widened
from hemiola.runtime.engine.step import Batch, Plan, Row


class Pairs(NamedTuple):
    """What the head is called with, for P pairs of M rows of which D get drafts; and those D."""

    token_ids: Operand  # [P] int32
    hidden: Operand  # [P, F]
    positions: Operand  # [P] int32
    rows: Operand  # [M, 8] int32
    page_table: Operand  # [M, W] int32
    logits_ids: Operand  # [D] int32
    drafting: Operand  # [D, 2] int64: slot, drafts that it gets


def _empty(like: Operand, pairs: Any, rows: Any, drafting: Any, features: int, pages: int) -> Pairs:
    code, int32 = code_of(like), torch.int32
    return Pairs(
        code.empty(pairs, dtype=int32),
        code.empty(pairs, features),
        code.empty(pairs, dtype=int32),
        code.empty(rows, WIDTH, dtype=int32),
        code.empty(rows, pages, dtype=int32),
        code.empty(drafting, dtype=int32),
        code.empty(drafting, 2, dtype=torch.int64),
    )


def first_pairs(
    asked: Operand, rows: Operand, hidden: Operand, ring: Operand, table: Operand, ledger: Columns,
    num_pairs: Any, num_reading: Any, num_drafting: Any,
) -> Pairs:  # fmt: skip
    """Those of the step's own tokens, and owed ones; last pairs of rows with room bring drafts."""
    (ring_len, features), pages = ring.shape[1:], table.shape[1]
    made = _empty(asked, num_pairs, num_reading, num_drafting, features, pages)
    known = (asked, rows, hidden, ring, ring_len, features, table, pages)
    lengths = (ledger.ids, ledger.line, ledger.committed_len)
    code_of(asked).call(_pairs, 1, 0, asked.shape[0], *known, *lengths, *made)
    return made


def next_pairs(
    asked: Operand, states: Operand, table: Operand, ledger: Columns, at: Any, num_drafting: Any
) -> Pairs:
    """Of draft number at - 1 of each row with more room than `at`, and the state that it came from.

    states [D, F]: of the rows with room for the draft before."""
    features, pages = states.shape[1], table.shape[1]
    made = _empty(asked, num_drafting, num_drafting, num_drafting, features, pages)
    known = (asked, at, states, features, table, pages, ledger.ids, ledger.line, ledger.total_len)
    code_of(asked).call(_again, 1, 0, asked.shape[0], *known, *made)
    return made


def keep(rows: Operand, hidden: Operand, ring: Operand, ledger: Columns) -> None:
    """New states into the rings of their slots, when pairs have read what stood there; and for snapshots."""
    cost = numel(hidden) * 0.1
    code_of(rows).call(_keep, rows.shape[0], cost, rows, ledger.edge, hidden, ring, *ring.shape[1:])


def write(drafting: Operand, at: Any, logits: Operand, chosen: Operand, ledger: Columns) -> None:
    """Draft number `at` of these rows; with the first, how many there will be. chosen: [D], or none."""
    num, vocab_size = logits.shape
    where = (drafting, ledger.ids, ledger.line, ledger.total_len, ledger.num_drafts)
    known = (at, vocab_size, logits, chosen, chosen.shape[0])
    code_of(drafting).call(_write, num, num * (0.15 * vocab_size), *known, *where)


class Passes:
    """The head's passes of a step, done at once."""

    def __init__(
        self, session: Drafter, ring: torch.Tensor, pages: PagePool, ledger: Ledger, vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._session, self._ring, self._ledger = session, ring, ledger
        self._table = torch.from_numpy(pages.table)
        self._columns = Columns.of(code_of(ring), ledger)

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        """MtpProposer.propose"""
        asked, hidden, pairs = all_asked(plan.rows), hidden.contiguous(), None
        reading = [row for row in plan.rows if row.reads]
        drafting = [row for row in reading if row.room > 0]
        if reading:
            num_pairs = sum(row.num_tokens + row.owed for row in reading)
            known = (asked, batch.rows, hidden, self._ring, self._table, self._columns)
            pairs = first_pairs(*known, num_pairs, len(reading), len(drafting))
        keep(batch.rows, hidden, self._ring, self._columns)
        for at in range(max((row.room for row in drafting), default=0) or 1):
            if pairs is None:
                return
            logits, states = self._run(pairs)
            self._write(drafting, pairs, at, logits)
            drafting = [row for row in drafting if row.room > at + 1]
            known = (asked, states.contiguous(), self._table, self._columns)
            pairs = next_pairs(*known, at + 1, len(drafting)) if drafting else None

    def _run(self, pairs: Pairs) -> Computed:
        inputs = pairs._asdict()
        del inputs["drafting"]
        return self._session.draft(**inputs)

    def _write(self, rows: list[Row], pairs: Pairs, at: int, logits: torch.Tensor) -> None:
        ledger, rules = self._ledger, [row.request.rule for row in rows]
        slots, chosen = pairs.drafting[:, 0], torch.empty(0, dtype=torch.int64)
        if takes_more_than_best(rules):
            logits = widened(logits, self._vocab_size)
            chosen = choose(logits, rules, slots, ledger.total_len[slots] + at, ledger.ids)
        write(pairs.drafting, at, logits.contiguous(), chosen, self._columns)


@helper
def _begin(rows, n, first, num, slot, place, table, page_table, pages):
    """Line n of the head's rows, and its pages."""
    at = n * WIDTH
    for i in range(WIDTH):
        put_int(rows, at + i, 0)
    put_int(rows, at + FIRST, first)
    put_int(rows, at + NUM_TOKENS, num)
    put_int(rows, at + SLOT, slot)
    put_int(rows, at + COMMITTED, place)
    for i in range(pages):
        put_int(page_table, n * pages + i, get_int(table, slot * pages + i))


@helper
def _drafts_of(drafting, n, slot, room):
    put_long(drafting, 2 * n, slot)
    put_long(drafting, 2 * n + 1, room)


@Kernel
def _pairs(
    item, scratch, num_rows, asked, rows, hidden, ring, ring_len, width, table, pages, ids, ids_len,
    committed_len, token_ids, before, positions, fed, page_table, wanted, drafting,
):  # fmt: skip
    """One item. The pair behind a row's token has offset 1; up to 0 they are owed, and in the ring."""
    pair, reading, wanting = 0, 0, 0
    for n in range(num_rows):
        if get_long(asked, n * ASKED + READS) == 0:
            continue
        owed, room = get_long(asked, n * ASKED + OWED), get_long(asked, n * ASKED + ROOM)
        first, num = get_int(rows, n * WIDTH + FIRST), get_int(rows, n * WIDTH + NUM_TOKENS)
        slot, committed = get_int(rows, n * WIDTH + SLOT), get_int(rows, n * WIDTH + COMMITTED)
        _begin(fed, reading, pair, num + owed, slot, committed + 1 - owed, table, page_table, pages)
        reading += 1
        if room > 0:
            put_int(wanted, wanting, pair + owed + get_long(committed_len, slot) - committed - 1)
            _drafts_of(drafting, wanting, slot, room)
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
    item, scratch, num_rows, asked, at, states, width, table, pages, ids, ids_len, total_len,
    token_ids, before, positions, fed, page_table, wanted, drafting,
):  # fmt: skip
    """One item: the pairs of the last draft of each row and the state that it came from."""
    found, known = 0, 0
    for n in range(num_rows):
        slot, room = get_long(asked, n * ASKED + OWN), get_long(asked, n * ASKED + ROOM)
        if room > at:
            place = get_long(total_len, slot) + at - 1
            _begin(fed, found, found, 1, slot, place, table, page_table, pages)
            _drafts_of(drafting, found, slot, room)
            put_int(wanted, found, found)
            put_int(token_ids, found, get_int(ids, slot * ids_len + place))
            put_int(positions, found, place)
            move(states, known * width, before, found * width, width)
            found += 1
        if room >= at:
            known += 1


@Kernel
def _write(
    line, scratch, at, vocab_size, logits, chosen, num_chosen, drafting, ids, ids_len, total_len, num_drafts
):  # fmt: skip
    """An item is a line of logits: its best token, or the one that was chosen, becomes a draft."""
    slot = get_long(drafting, 2 * line)
    token = get_long(chosen, line) if num_chosen > 0 else best_of(logits + 4 * line * vocab_size, vocab_size)
    put_int(ids, slot * ids_len + get_long(total_len, slot) + at, token)
    if at == 0:
        put_long(num_drafts, slot, get_long(drafting, 2 * line + 1))
