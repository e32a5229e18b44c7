"""A CPU's steps as one call: fill, trunk, judge, ledger and drafts, without Python between them.

It has the interface of decode.py's one graph for a GPU. A plan goes in as numbers, which kernels join with
the ledger; what the host is told comes out as numbers. Every pass of an MTP head behind the first is a step
of its own, which is repeated. Rows that take more than an argmax are left to the loop, part by part.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hemiola.plugins.cpu.code import Recorder, View
from hemiola.plugins.cpu.sizes import FreeSize
from hemiola.plugins.cpu.steps import RecordedStep, run_all
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.config import Resolved
from hemiola.runtime.engine.compiled import (
    ASKED,
    TOLD,
    Columns,
    accept,
    asked,
    best,
    filled,
    look_up,
    mark,
    tell,
)
from hemiola.runtime.engine.decode import MARKS, Marks, Told
from hemiola.runtime.engine.drafts.mtp_compiled import Pairs, first_pairs, keep, next_pairs, write
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Outcome, Plan

Record = Callable[[Recorder, Mapping[str, View]], list[View]]
# Tokens, rows, logits, rows that choose; pairs, rows that read them, rows that get drafts; logits of a row.
SIZES = ("T", "N", "L", "R", "P", "M", "D", "width")
NOBODY = torch.empty(0)


class Fitted(NamedTuple):
    """A plan as a step reads it."""

    asked: "array[int]"
    chose: list[int]  # rows of the plan
    width: int
    rooms: list[int]  # of rows that get drafts
    sizes: dict[str, int]


class Recorded:
    """`records`: trunk and head as parts of a step. ring: the head's slot state; empty: no head drafts."""

    def __init__(
        self,
        config: Resolved,
        ledger: Ledger,
        pages: PagePool,
        records: Sequence[Record],
        ring: torch.Tensor,
        poisoned: bool = False,
    ) -> None:
        self._config, self._ledger, self._ring = config, ledger, ring
        self._table = torch.from_numpy(pages.table)
        self._is_head = config.drafts == "mtp"
        self._states = torch.empty(config.max_rows, ring.shape[-1])  # the head's own, from pass to pass
        self.logits = torch.empty(0, config.vocab_size)  # of the last step
        self._step = self._first(records, poisoned)
        self._again = self._further(records[-1], poisoned) if self._is_head else self._step
        self.num_steps = 0

    def open(self, slot_id: int, rule: Rule) -> None:
        pass

    def fit(self, plan: Plan) -> Fitted | None:
        """None: a row takes more than an argmax."""
        numbers, chose, rooms = array("q"), [], []
        num_tokens = num_logits = num_pairs = num_reading = 0
        width = 1
        for n, row in enumerate(plan.rows):
            num_tokens += row.num_tokens
            numbers.extend(asked(row))
            if row.chooses:
                if not row.request.rule.plain or row.request.guide is not None:
                    return None
                chose.append(n)
                num_logits += 1 + row.num_drafts
                width = max(width, 1 + row.num_drafts)
            if row.room > 0:
                rooms.append(row.room)
            if self._is_head and row.reads:
                num_reading += 1
                num_pairs += row.num_tokens + row.owed
        sizes = (num_tokens, len(plan.rows), num_logits, len(chose), num_pairs, num_reading, len(rooms))
        return Fitted(numbers, chose, width, rooms, dict(zip(SIZES, (*sizes, width), strict=True)))

    def launch(self, plan: Plan, fitted: Fitted) -> Told:
        """All of it is done when this returns."""
        found = array("q", bytes(8 * (MARKS + len(fitted.chose) * (fitted.width + TOLD))))
        where, _ = fitted.asked.buffer_info()
        if fitted.sizes["L"] > len(self.logits):
            self.logits = torch.empty(fitted.sizes["L"], self._config.vocab_size)
        at = {"asked": where, "told": found.buffer_info()[0], "logits": self.logits.data_ptr()}
        steps = [(self._step, fitted.sizes | at)]
        for number in range(1, max(fitted.rooms, default=0) if self._is_head else 0):
            num = sum(room > number for room in fitted.rooms)
            steps.append((self._again, {"N": fitted.sizes["N"], "D": num, "number": number, "asked": where}))
        run_all(steps)
        self.num_steps += 1
        return Told(_Found(found, fitted.chose, fitted.width), NOBODY, None, Marks(found))

    def _first(self, records: Sequence[Record], poisoned: bool) -> RecordedStep:
        """All but the head's further passes."""
        code = Recorder()
        tokens, rows, logits_, choosing, pairs_, reading, drafting, width = map(FreeSize, SIZES)
        told = code.input("told", (1, 1), torch.int64)
        found, plan = replace(told, offset=MARKS), code.input("asked", (rows, ASKED), torch.int64)
        table, ledger = code.given(self._table), Columns.of(code, self._ledger)
        mark(code, told, 0)
        made = filled(plan, table, ledger, tokens, logits_, choosing)
        logits, hidden = records[0](code, made._asdict())
        logits.buffer.input = "logits"
        mark(code, told, 1)
        verdict = (made.slots, made.final_len, made.slot_id, made.num_drafts, *best(logits))
        accept(*verdict, ledger, self._config.chunk_len, width, found)
        mark(code, told, 2)
        if self._config.drafts == "ngram":
            look_up(plan, ledger, self._config.ngram_min, self._config.ngram_max)
        if self._is_head:
            ring = code.given(self._ring)
            known = (plan, made.rows, hidden, ring, table, ledger)
            pairs = first_pairs(*known, pairs_, reading, drafting)
            keep(made.rows, hidden, ring, ledger)
            self._draft(records[-1], code, pairs, 0, ledger)
        tell(made.slot_id, ledger, width, found)
        mark(code, told, 3)
        return RecordedStep(code, [*SIZES, "asked", "told", "logits"], poisoned)

    def _further(self, record: Record, poisoned: bool) -> RecordedStep:
        """One more pass of the head."""
        code = Recorder()
        plan = code.input("asked", (FreeSize("N"), ASKED), torch.int64)
        table, ledger = code.given(self._table), Columns.of(code, self._ledger)
        states, number = code.given(self._states), FreeSize("number")
        pairs = next_pairs(plan, states, table, ledger, number, FreeSize("D"))
        self._draft(record, code, pairs, number, ledger)
        return RecordedStep(code, ["N", "D", "number", "asked"], poisoned)

    def _draft(
        self, record: Record, code: Recorder, pairs: Pairs, number: "int | FreeSize", ledger: Columns
    ) -> None:
        logits, states = record(code, pairs._asdict())
        states.buffer.tensor = self._states
        write(pairs.drafting, number, logits, code.given(NOBODY), ledger)


class _Found:
    """An Answer."""

    def __init__(self, told: "array[int]", chose: list[int], width: int) -> None:
        self._told, self._chose, self._width = told, chose, width

    def read(self, num_drafts: torch.Tensor, drafts: torch.Tensor | None) -> Outcome:
        numbers, width, at = self._told.tolist(), self._width, MARKS
        outcome = Outcome({}, {}, {}, set(), {})
        for n in self._chose:
            accepted, judged, broken, proposed = numbers[at + width : at + width + TOLD]
            outcome.token_ids[n] = numbers[at : at + accepted + 1 - broken]
            outcome.num_judged[n], outcome.num_drafts[n] = judged, proposed
            if broken:
                outcome.broken.add(n)
            at += width + TOLD
        return outcome
