"""What a leader sends of a step is all that its followers need to make the same rows and the same copies."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.schedule.plan import Plan, Row, Scored
from hemiola.runtime.step.pack import pack
from hemiola.runtime.step.ranked import RankedSteps
from hemiola.runtime.step.record import StepRecord, packed, unpacked


def a_rule(seed: int = 0) -> Rule:
    return Rule(SamplingParams(), seed, 1, frozenset())


def some_rows(has_head: bool) -> list[Row]:
    """Every combination of what a row may be. Only a head leaves pairs for later."""
    rows, request = [], SimpleNamespace(guide=None)
    kinds = itertools.product((0, 2), (True, False), (True, False) if has_head else (True,), (0, 3), (0, 2))
    for slot, (num_drafts, chooses, reads, owed, room) in enumerate(kinds, 1):
        row = Row(request, slot, 1 + num_drafts, num_drafts * chooses, chooses, owed, (0, 0))  # type: ignore
        row.reads, row.room, row.snapshot_slot, row.snapshot_edge = reads, room, slot + 90, 4 * slot
        rows.append(row)
    return rows


@pytest.mark.parametrize("has_head", [True, False])
def test_a_follower_makes_the_rows_of_its_leader(has_head: bool) -> None:
    rows, scored = some_rows(has_head), {2: Scored(0, 1, np.array([5]), 3)}
    rules = {row.slot_id: a_rule(row.slot_id) for row in rows}
    ready, changes = pack(rows, has_head), np.zeros((0, 2), np.int64)
    record = unpacked(packed(StepRecord(1, [], ready, None, changes, scored, has_head, False)))
    assert isinstance(record, StepRecord)
    made = record.plan(rules).rows
    for n, (own, row) in enumerate(zip(made, rows, strict=True)):
        for name in Row.__slots__:
            if name not in ("request", "edges", "scored"):
                assert getattr(own, name) == getattr(row, name), f"{name} of {row}"
        assert own.rule is rules[row.slot_id] and (own.scored is None) == (n not in scored)
    assert made[2].scored is not None and made[2].scored.token_ids.tolist() == [5]


class Heard:
    """Followers that keep what is sent, and a store and steps that do nothing."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.table = SimpleNamespace(tell=lambda: np.zeros((0, 2), np.int64))
        self.ledger = SimpleNamespace(device=SimpleNamespace(type="cpu"))

    def send(self, number: int, record: bytes) -> None:
        found = unpacked(record)
        assert isinstance(found, StepRecord)
        self.records.append(found)

    def ready(self, plan: Plan) -> Any:
        return pack(plan.rows, False)

    def fit(self, plan: Plan) -> None: ...

    def open(self, *given: object) -> None: ...

    def launch_as(self, *given: object) -> None: ...

    def landed(self, *given: object) -> None: ...

    def copy_slot(self, source: int, target: int) -> None: ...

    def keep_changes(self) -> None: ...


def test_a_follower_copies_a_snapshot_again_for_the_next_request_of_a_slot() -> None:
    """Over what that one has read from the host's memory."""
    heard: Any = Heard()
    steps, ids = RankedSteps(heard, heard, heard, heard, False), np.array([1, 2], np.int32)
    steps.copy_slot(7, 3)
    for slot_id in (3, 4):
        steps.open(slot_id, ids, 0, a_rule())
    steps.launch(Plan())
    steps.open(3, ids, 0, a_rule())
    steps.launch(Plan())
    opened = [[(o.slot_id, o.restore_from) for o in record.openings] for record in heard.records]
    assert opened == [[(3, 7), (4, 0)], [(3, 0)]]
