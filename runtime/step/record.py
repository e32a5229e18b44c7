"""What the leader sends its followers: of a step the packed plan, and all else that decides it; and copies of
pages and slots to and from units of the host.

A follower has no requests. Of a row it knows what the packed plan says (plugins/step/plan.py), the rule that
came when the slot was taken, and what a grammar allows.
"""

import pickle
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, NamedTuple, cast

import numpy as np

from hemiola.plugins.step.plan import COLUMNS, PlanFields
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.schedule.plan import Opening, Plan, Row, Scored
from hemiola.runtime.schedule.request import Request
from hemiola.runtime.step.pack import Ready
from hemiola.runtime.step.steps import Execution

SLOT = COLUMNS.index("slot")


class StepRecord(NamedTuple):
    """One step."""

    number: int
    openings: list[Opening]
    ready: Ready
    fitted: Execution
    changes: np.ndarray  # [E, 2] int64, entries of the page table
    scored: dict[int, Scored]  # by row, of those whose prompts are scored
    has_head: bool
    is_checked: bool  # each rank posts a digest of its ledger

    @property
    def slot_ids(self) -> list[int]:
        """Of all rows."""
        return self.ready.packed.numbers[SLOT : -len(COLUMNS) : len(COLUMNS)].tolist()

    def _lines(self) -> list[PlanFields]:
        width = len(COLUMNS)
        numbers = self.ready.packed.numbers
        return [PlanFields(*numbers[at : at + width]) for at in range(0, len(numbers), width)]

    def plan(self, rules: Mapping[int, Rule]) -> Plan:
        """The plan again, of rows without requests: for steps that run op by op. rules: by slot."""
        lines = enumerate(pairwise(self._lines()))
        return Plan([self._row(n, *pair, rules) for n, pair in lines], self.openings)

    def _row(self, n: int, line: PlanFields, after: PlanFields, rules: Mapping[int, Rule]) -> Row:
        return Row(
            request=cast(Request, RowOwner(rules[line.slot])),
            slot_id=line.slot,
            num_tokens=after.token - line.token,
            num_drafts=line.num_drafts,
            chooses=after.line > line.line,
            owed=line.owed,
            edges=(0, 0),  # for the scheduler
            reads=not self.has_head or after.pair > line.pair,
            room=line.room,
            snapshot_slot=line.snapshot_slot,
            snapshot_edge=line.snapshot_edge,
            scored=self.scored.get(n),
        )


class Move(NamedTuple):
    """A call of a Mover's (runtime/cache/tier.py), which every rank repeats with its own pages and slots."""

    method: Literal["save_pages", "save_slot", "load_pages", "load_slot", "mark", "hold"]
    args: tuple[list[int] | int, ...]


def packed(record: StepRecord | Move) -> bytes:
    return pickle.dumps(record, protocol=5)


def unpacked(data: bytes) -> StepRecord | Move:
    """From memory that no other process can write."""
    return pickle.loads(data)


class RowOwner(NamedTuple):
    """Of a request, what a step reads."""

    rule: Rule
