"""A plan as one table of numbers, for every kind of step and for all ranks (plugins/step/plan.py)."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hemiola.plugins.step.plan import COLUMNS
from hemiola.runtime.schedule.plan import Row


class PlanSizes(NamedTuple):
    """Of a step."""

    rows: int
    tokens: int
    lines: int  # of logits
    pairs: int  # that a drafting head reads
    drafting: int  # rows that it drafts for
    width: int  # most lines of a row
    passes: int  # most drafts of a row


class PackedPlan(NamedTuple):
    """What every rank gets of a plan's rows."""

    numbers: "array[int]"  # the table [N + 1, 10] int32, flat
    sizes: PlanSizes


# Of rows that follow a grammar, by place in the plan: for each line, what it allows.
MasksOfRows = dict[int, list[np.ndarray]]


class Ready(NamedTuple):
    """A plan as executors take it, made once."""

    packed: PackedPlan
    masks: MasksOfRows


def pack(rows: Sequence[Row], has_head: bool) -> Ready:
    """has_head: an MTP head reads pairs and drafts."""
    numbers, masks = array("i"), {}
    tokens = lines = pairs = drafting = passes = 0
    width = 1
    for n, row in enumerate(rows):
        room = row.room
        numbers.extend((
            tokens, lines, pairs, drafting, row.slot_id, row.num_drafts, room, row.owed,
            row.snapshot_slot, row.snapshot_edge,
        ))  # fmt: skip
        tokens += row.num_tokens
        if row.chooses:
            lines += 1 + row.num_drafts
            if row.num_drafts >= width:
                width = 1 + row.num_drafts
        if has_head and row.reads:
            pairs += row.num_tokens + row.owed
            drafting += room > 0
        if room > passes:
            passes = room
        if (guide := row.request.guide) is not None:
            masks[n] = guide.masks[: 1 + row.num_drafts] if row.chooses else []
    numbers.extend((tokens, lines, pairs, drafting, 0, 0, 0, 0, 0, 0))
    sizes = PlanSizes(len(rows), tokens, lines, pairs, drafting, width, passes)
    return Ready(PackedPlan(numbers, sizes), masks)


def padded(numbers: "array[int]", num_rows: int) -> "array[int]":
    """A packed plan with so many rows: the last line again, and again."""
    width = len(COLUMNS)
    return numbers + numbers[-width:] * (num_rows + 1 - len(numbers) // width)
