"""What a step on a CPU needs around the engine, compiled: fill, judge and prompt lookup.

They compute the same numbers as feed.py, judge.py and drafts/ngram.py. Each is written like a form
(plugins/cpu/code.py): on tensors it is done at once, on views it becomes a part of a step (recorded.py).
"""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from hemiola.plugins.cpu.atomics import clock_gettime
from hemiola.plugins.cpu.code import Code, Operand, code_of
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    f32,
    get,
    get_int,
    get_long,
    largest,
    load,
    mul,
    peak,
    put_int,
    put_long,
    splat,
    total,
)
from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.engine import sampling
from hemiola.runtime.engine.judge import masked
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.sampling import logprobs
from hemiola.runtime.engine.step import Batch, Choices, Masks, Plan, Row, Verdict, asked_of

FIRST, NUM_TOKENS, DRAFTS, SLOT, COMMITTED, EDGE, SNAPSHOT_SLOT, SNAPSHOT_EDGE = range(len(COLUMNS))
WIDTH = len(COLUMNS)
# What is asked of a row, in numbers of int64.
NUM, JUDGED, OWN, KEPT_IN, KEPT_AT, CHOOSES, READS, OWED, ROOM = range(9)
ASKED = 9
TOLD = 4  # of each row that chose, behind its tokens: accepted, judged, broken, drafts for its next step
CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)


def asked(row: Row) -> tuple[int, ...]:
    """A row of a plan as kernels read it."""
    return (
        row.num_tokens, row.num_drafts, row.slot_id, row.snapshot_slot, row.snapshot_edge,
        row.chooses, row.reads, row.owed, row.room,
    )  # fmt: skip


def all_asked(rows: Iterable[Row]) -> torch.Tensor:
    """[N, ASKED]"""
    return torch.from_numpy(np.array([asked(row) for row in rows], np.int64))


class Columns(NamedTuple):
    """A ledger's."""

    ids: Operand
    total_len: Operand
    committed_len: Operand
    edge: Operand
    num_drafts: Operand

    @staticmethod
    def of(code: Code, ledger: Ledger) -> "Columns":
        parts = (ledger.ids, ledger.total_len, ledger.committed_len, ledger.edge, ledger.num_drafts)
        return Columns._make(map(code.given, parts))

    @property
    def line(self) -> Any:
        """Ids of a slot."""
        return self.ids.shape[1]


class Filled(NamedTuple):
    """A step's inputs, and what judging needs; T tokens, N rows of which R choose by L logits."""

    rows: Operand  # [N, 8]
    page_table: Operand  # [N, W]
    token_ids: Operand  # [T]
    positions: Operand  # [T]
    logits_ids: Operand  # [L]
    # int64
    slots: Operand  # [N]
    final_len: Operand  # [N]
    slot_id: Operand  # [R]
    num_drafts: Operand  # [R]
    row: Operand  # [L]
    offset: Operand  # [L]


def filled(
    asked: Operand, table: Operand, ledger: Columns, num_tokens: Any, num_logits: Any, num_choosing: Any
) -> Filled:
    """asked [N, ASKED]; table [S, W]: pages by slot."""
    code, num_rows, width = code_of(asked), asked.shape[0], table.shape[1]
    made = Filled(
        code.empty(num_rows, WIDTH, dtype=torch.int32),
        code.empty(num_rows, width, dtype=torch.int32),
        *(code.empty(size, dtype=torch.int32) for size in (num_tokens, num_tokens, num_logits)),
        *(code.empty(size, dtype=torch.int64) for size in (num_rows, num_rows)),
        *(code.empty(size, dtype=torch.int64) for size in (num_choosing, num_choosing)),
        *(code.empty(size, dtype=torch.int64) for size in (num_logits, num_logits)),
    )
    known = (table, width, ledger.ids, ledger.line, ledger.committed_len, ledger.edge)
    code.call(_fill, 1, 0, num_rows, asked, *known, *made)
    return made


def fill(plan: Plan, table: np.ndarray, ledger: Ledger) -> Batch:
    """Feed.fill; `table` is the page table by slot."""
    rows = [n for n, row in enumerate(plan.rows) if row.chooses]
    num_lines = [1 + plan.rows[n].num_drafts for n in rows]
    rules = [plan.rows[n].request.rule for n, num in zip(rows, num_lines, strict=True) for _ in range(num)]
    told, pages = all_asked(plan.rows), torch.from_numpy(table)
    made = filled(told, pages, Columns.of(code_of(told), ledger), plan.num_tokens, len(rules), len(rows))
    width = max(num_lines, default=1)
    return Batch(
        rows=made.rows,
        logits_ids=made.logits_ids,
        page_table=made.page_table,
        token_ids=made.token_ids,
        positions=made.positions,
        slots=made.slots,
        final_len=made.final_len,
        choices=Choices(
            rows=rows,
            width=width,
            dense=len(rules) == len(rows) * width,
            slot_id=made.slot_id,
            num_drafts=made.num_drafts,
            row=made.row,
            offset=made.offset,
            rules=rules,
            asked=asked_of(rows, num_lines, rules),
        ),
        masks=Masks.of(plan, ledger.device),
    )


def judge(batch: Batch, logits: torch.Tensor, ledger: Ledger, chunk_len: int) -> Verdict:
    """judge.judge, for a batch whose rows have their logits side by side and nothing between them."""
    choices, width = batch.choices, batch.choices.width
    chosen, bad = choose(masked(logits, batch.masks), choices, ledger)
    found = torch.zeros(len(choices.rows), width + TOLD, dtype=torch.int64)
    columns = Columns.of(code_of(found), ledger)
    accept(
        batch.slots, batch.final_len, choices.slot_id, choices.num_drafts, chosen, bad, columns, chunk_len,
        width, found,
    )  # fmt: skip
    num_accepted, num_judged, broken, _ = found[:, width:].unbind(1)
    return Verdict(
        rows=choices.rows,
        token_ids=found[:, :width],
        num_accepted=num_accepted,
        num_judged=num_judged,
        broken=broken,
        logprobs={row: logprobs(logits[own], chosen[own], num) for row, own, num in choices.asked},
    )


def accept(
    slots: Operand, final_len: Operand, slot_id: Operand, num_drafts: Operand, chosen: Operand, bad: Operand,
    ledger: Columns, chunk_len: int, width: Any, found: Operand,
) -> None:  # fmt: skip
    """judge.py's law, into the ledger and into found [R, width + TOLD]."""
    sizes = (slots.shape[0], slot_id.shape[0], width, chunk_len)
    of_batch = (slots, final_len, slot_id, num_drafts, chosen, bad)
    lengths = (ledger.total_len, ledger.committed_len, ledger.edge, ledger.num_drafts)
    code_of(slots).call(_accept, 1, 0, *sizes, *of_batch, ledger.ids, ledger.line, *lengths, found)


def tell(slot_id: Operand, ledger: Columns, width: Any, found: Operand) -> None:
    """How many drafts there are now, into `found`."""
    code_of(slot_id).call(_tell, slot_id.shape[0], 0, width, slot_id, ledger.num_drafts, found)


def choose(logits: torch.Tensor, choices: Choices, ledger: Ledger) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each line, and whether the line is broken, both [L] int64."""
    if sampling.takes_more_than_best(choices.rules):
        line_slot = choices.slot_id[choices.row]
        position = ledger.total_len[line_slot] + choices.offset
        chosen = sampling.choose(logits, choices.rules, line_slot, position, ledger.ids)
        return chosen, sampling.broken(logits).to(torch.int64)
    return best(logits.contiguous())


def best(logits: Operand) -> tuple[Operand, Operand]:
    """The first of the best tokens of each line [L, V], or the first NaN; and whether it is not finite."""
    code, (num_lines, vocab_size) = code_of(logits), logits.shape
    chosen, bad = (code.empty(num_lines, dtype=torch.int64) for _ in range(2))
    code.call(_choose, num_lines, num_lines * (0.15 * vocab_size), vocab_size, logits, chosen, bad)
    return chosen, bad


def look_up(asked: Operand, ledger: Columns, min_n: int, max_n: int) -> None:
    """Drafts by prompt lookup for rows that have room."""
    num_rows, cost = asked.shape[0], 2.0 * ledger.line
    of_ledger = (ledger.ids, ledger.line, ledger.total_len, ledger.num_drafts)
    code_of(asked).call(_look_up, num_rows, num_rows * cost, min_n, max_n, asked, *of_ledger)


def mark(code: Code, told: Operand, place: int) -> None:
    """The time, in nanoseconds."""
    code.call(_mark, 1, 0, told, place, CLOCK, scratch=16)


@Kernel
def _mark(item, scratch, told, place, clock):
    clock_gettime(clock, scratch)
    put_long(told, place, get_long(scratch, 0) * 1_000_000_000 + get_long(scratch, 1))


@Kernel
def _fill(
    item, scratch, num_rows, asked, table, width, ids, ids_len, committed_len, edges,
    rows, page_table, token_ids, positions, logits_ids, slots, final_len, slot_id, num_drafts, row_of,
    offset_of,
):  # fmt: skip
    """One item: all rows."""
    t, choosing, line = 0, 0, 0
    for n in range(num_rows):
        at, known = WIDTH * n, ASKED * n
        num, drafts, slot = (
            get_long(asked, known + NUM),
            get_long(asked, known + JUDGED),
            get_long(asked, known + OWN),
        )
        committed = get_long(committed_len, slot)
        put_int(rows, at + FIRST, t)
        put_int(rows, at + NUM_TOKENS, num)
        put_int(rows, at + DRAFTS, drafts)
        put_int(rows, at + SLOT, slot)
        put_int(rows, at + COMMITTED, committed)
        put_int(rows, at + EDGE, get_long(edges, slot))
        put_int(rows, at + SNAPSHOT_SLOT, get_long(asked, known + KEPT_IN))
        put_int(rows, at + SNAPSHOT_EDGE, get_long(asked, known + KEPT_AT))
        for i in range(width):
            put_int(page_table, n * width + i, get_int(table, slot * width + i))
        put_long(slots, n, slot)
        put_long(final_len, n, committed + num - drafts)
        for i in range(num):
            put_int(token_ids, t + i, get_int(ids, slot * ids_len + committed + i))
            put_int(positions, t + i, committed + i)
        t += num
        if get_long(asked, known + CHOOSES) == 0:
            continue
        put_long(slot_id, choosing, slot)
        put_long(num_drafts, choosing, drafts)
        for i in range(drafts + 1):
            put_int(logits_ids, line, t - drafts - 1 + i)
            put_long(row_of, line, choosing)
            put_long(offset_of, line, i)
            line += 1
        choosing += 1


@helper
def _slowly(at, vocab_size):
    """best_of, for numbers that are not all finite."""
    best = 0
    for i in range(1, vocab_size):
        value, known = get(at, i), get(at, best)
        if known == known and (value > known or value != value):
            best = i
    return best


@helper
def best_of(at, vocab_size):
    """The first of the best numbers, or the first that is NaN."""
    highest, zeros = splat(f32(-np.inf)), splat(f32(0.0))
    whole = vocab_size // LANES * LANES
    for i in range(0, whole, LANES):
        value = load(at, i)
        highest = largest(value, highest)
        zeros = add(zeros, mul(value, splat(f32(0.0))))  # NaN, if one is not finite
    top, rest = peak(highest), f32(0.0)
    for i in range(whole, vocab_size):
        top, rest = max(top, get(at, i)), rest + get(at, i) * f32(0.0)
    if total(zeros) + rest != f32(0.0):  # also if it is NaN
        return _slowly(at, vocab_size)
    best = 0
    while get(at, best) != top:
        best += 1
    return best


@Kernel
def _choose(line, scratch, vocab_size, logits, chosen, bad):
    """An item is a line."""
    at = logits + 4 * line * vocab_size
    token = best_of(at, vocab_size)
    value = get(at, token)
    put_long(chosen, line, token)
    put_long(bad, line, 0 if value - value == f32(0.0) else 1)


@Kernel
def _accept(
    item, scratch, num_rows, num_choosing, width, chunk_len, slots, final_len, slot_id, num_drafts, chosen,
    bad, ids, ids_len, total_len, committed_len, edges, ledger_drafts, found,
):  # fmt: skip
    """One item: all rows. See judge.py for the law."""
    for n in range(num_rows):
        slot, final = get_long(slots, n), get_long(final_len, n)
        put_long(committed_len, slot, final)
        put_long(edges, slot, final - final % chunk_len)
    line = 0
    for r in range(num_choosing):
        slot, drafts, at = get_long(slot_id, r), get_long(num_drafts, r), r * (width + TOLD)
        text = get_long(total_len, slot)
        judged, accepted = min(drafts, get_long(ledger_drafts, slot)), 0
        for i in range(drafts + 1):
            put_long(found, at + i, get_long(chosen, line + i))
        while (
            accepted < judged
            and get_long(bad, line + accepted) == 0
            and get_long(chosen, line + accepted) == get_int(ids, slot * ids_len + text + accepted)
        ):
            accepted += 1
        put_int(ids, slot * ids_len + text + accepted, get_long(chosen, line + accepted))
        put_long(total_len, slot, text + accepted + 1)
        put_long(committed_len, slot, text + accepted)
        put_long(ledger_drafts, slot, 0)
        put_long(found, at + width, accepted)
        put_long(found, at + width + 1, judged)
        put_long(found, at + width + 2, get_long(bad, line + accepted))
        line += drafts + 1


@Kernel
def _tell(r, scratch, width, slot_id, num_drafts, found):
    put_long(found, r * (width + TOLD) + width + 3, get_long(num_drafts, get_long(slot_id, r)))


@Kernel
def _look_up(item, scratch, min_n, max_n, asked, ids, ids_len, total_len, num_drafts):
    """An item is a row: what followed the latest earlier occurrence of the longest suffix."""
    slot, room = get_long(asked, ASKED * item + OWN), get_long(asked, ASKED * item + ROOM)
    if room == 0:
        return
    text, end = ids + 4 * slot * ids_len, get_long(total_len, slot)
    last, best, longest = end - 1, -1, min_n - 1
    for place in range(last - 1, -1, -1):
        if get_int(text, place) != get_int(text, last):
            continue
        num = 1
        while num < max_n and num <= place and get_int(text, place - num) == get_int(text, last - num):
            num += 1
        if num > longest:
            best, longest = place, num
            if num == max_n:
                break
    if best < 0:
        put_long(num_drafts, slot, 0)
        return
    for i in range(room):
        put_int(text, end + i, get_int(text, best + 1 + i % (last - best)))
    put_long(num_drafts, slot, room)
