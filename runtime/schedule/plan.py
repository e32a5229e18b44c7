"""What the scheduler says of a step, and what it learns: a Plan, and an Outcome."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hemiola.runtime.api import Logprob
from hemiola.runtime.choose.grammar import Guide
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.schedule.request import Request


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of a row behind which the prompt goes on, and whose log-probability is wanted."""

    first: int  # of the row's tokens
    position: int  # in the prompt, of the first of those behind them
    token_ids: np.ndarray  # [M] those behind them
    num_top: int  # best tokens to report


@dataclass(slots=True)
class Row:
    """A request in a step: it brings num_tokens tokens, of which the last num_drafts are drafts."""

    request: Request
    slot_id: int
    num_tokens: int
    num_drafts: int  # at most: the ledger knows how many there are
    chooses: bool  # it reaches the end of its text and gets a token
    owed: int  # tokens before it whose pairs a drafting head has not read: 1 behind a prefix hit
    edges: tuple[int, int]  # the slot's state moves from the first or a later edge to the last or an earlier
    reads: bool = True  # the head reads its pairs in this step; else they are owed
    room: int = 0  # drafts that may be proposed for its next step
    snapshot_slot: int = 0  # 0: none
    snapshot_edge: int = 0
    scored: Scored | None = None

    @property
    def rule(self) -> Rule:
        return self.request.rule

    @property
    def guide(self) -> Guide | None:
        return self.request.guide


@dataclass(frozen=True, slots=True)
class Opening:
    """Before the step a request takes its slot, with the state of a snapshot if it begins at one."""

    slot_id: int
    ids: np.ndarray
    start: int
    restore_from: int  # slot; 0: none
    rule: Rule


@dataclass(slots=True)
class Plan:
    """One step."""

    rows: list[Row] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    step: int = field(default=0, compare=False)  # the prefix cache's number of it

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class Outcome:
    """What the host learns of a step, by row of the plan, for the rows that chose; and of scored tokens."""

    token_ids: dict[int, list[int]]
    num_judged: dict[int, int]
    num_drafts: dict[int, int]
    broken: set[int]
    logprobs: dict[int, list[Logprob]]  # of rows that asked
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # of rows with scored tokens
    drafts: dict[int, list[int]] = field(default_factory=dict)  # proposed, if a row follows a grammar
    faults: dict[int, str] = field(default_factory=dict)  # rows whose answers cannot be read, and why


class Launched(Protocol):
    """A step under way; to be read behind a fence."""

    def seconds(self) -> tuple[float, float, float]:
        """Of the device: its trunk; choosing and accepting; drafting."""
        ...

    def read(self) -> Outcome: ...


class Steps(Protocol):
    """What runs plans (runtime/step/steps.py), or in tests something that stands before it."""

    def open(self, slot_id: int, ids: np.ndarray, start: int, rule: Rule) -> None:
        """A request takes a slot, and begins at `start`, up to which slot and pages are filled."""
        ...

    def launch(self, plan: Plan) -> Launched:
        """Start a step; nothing here waits for the device."""
        ...
