"""What a step is on its way: a Plan, a Batch for the device, a Verdict there, an Outcome for the host."""

import itertools
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hemiola.runtime.api import Logprob
from hemiola.runtime.device.transfer import fetch, upload
from hemiola.runtime.engine.request import Request, Rule
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.sampling import to_logprobs


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


@dataclass(frozen=True, slots=True)
class Opening:
    """Before the step a request takes its slot, with the state of a snapshot if it begins at one."""

    slot_id: int
    ids: np.ndarray
    start: int
    restore_from: int  # slot; 0: none
    rule: Rule


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    rows: list[Row] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Choices:
    """The tokens to choose, for the R rows that reach the end of their text; together they have L logits."""

    rows: list[int]  # their places in the plan
    width: int  # most logits of a row
    dense: bool  # every row has so many
    slot_id: torch.Tensor  # [R] int64
    num_drafts: torch.Tensor  # [R] int64
    row: torch.Tensor  # [L] int64, which of the R
    offset: torch.Tensor  # [L] int64, 0 for the first token behind the text; `width`: nobody's
    rules: list[Rule] | list[Group]  # of the L
    asked: list[tuple[int, slice, int]]  # rows that want logprobs, their logits, and of how many best tokens


@dataclass(frozen=True, slots=True)
class Masks:
    """What grammars allow, for G of the L logits."""

    lines: torch.Tensor | None  # [G] int64; None: all
    bits: torch.Tensor  # [G, words] int32, of the tokens that may be chosen

    @staticmethod
    def of(plan: Plan, device: torch.device) -> "Masks | None":
        """None: no row follows a grammar."""
        lines: list[int] = []
        bits: list[np.ndarray] = []
        end = 0
        for row in plan.rows:
            start, end = end, end + (1 + row.num_drafts) * row.chooses
            if row.chooses and row.request.guide is not None:
                lines += range(start, end)
                bits += row.request.guide.masks[: end - start]
        if not lines:
            return None
        return Masks(*upload(device, np.array(lines, np.int64), np.stack(bits).view(np.int32)))


def asked_of(rows: list[int], num_lines: list[int], rules: list[Rule]) -> list[tuple[int, slice, int]]:
    """Rows that want logprobs, their logits, and of how many best tokens."""
    asked = []
    for row, num, end in zip(rows, num_lines, itertools.accumulate(num_lines), strict=True):
        num_top = rules[end - 1].params.logprobs
        if num_top is not None:
            asked.append((row, slice(end - num, end), num_top))
    return asked


@dataclass(frozen=True, slots=True)
class Batch:
    """What the engine reads (abi.py), and what choosing needs. All tensors for the engine are int32."""

    # plan and ledger: which rows, and how many tokens of each
    rows: torch.Tensor  # [N, 8], plugins/rows.py
    logits_ids: torch.Tensor  # [L] tokens whose logits are wanted
    page_table: torch.Tensor  # [N, W]
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    # not for the engine
    slots: torch.Tensor  # [N] int64
    final_len: torch.Tensor  # [N] int64, tokens whose state is final when the step is done, drafts apart
    choices: Choices
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the host learns of a step, by row of the plan, for the rows that chose."""

    token_ids: dict[int, list[int]]
    num_judged: dict[int, int]
    num_drafts: dict[int, int]
    broken: set[int]
    logprobs: dict[int, list[Logprob]]  # of rows that asked
    drafts: dict[int, list[int]] = field(default_factory=dict)  # proposed, if a row follows a grammar
    faults: dict[int, str] = field(default_factory=dict)  # rows whose answers cannot be read, and why


class Answer(Protocol):
    """What a step has found."""

    def read(self, num_drafts: torch.Tensor, drafts: torch.Tensor | None) -> Outcome:
        """As the host understands it; num_drafts [R], drafts [R, K]: proposed for the rows' next step."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """A step's outcome; R rows chose."""

    rows: list[int]  # their places in the plan
    token_ids: torch.Tensor  # [R, 1 + K] int64: the accepted drafts, the next token, and what nobody keeps
    num_accepted: torch.Tensor  # [R]
    num_judged: torch.Tensor  # [R] drafts that there were; a row may have been planned with more
    broken: torch.Tensor  # [R] whether the engine computed NaN for the next token
    logprobs: dict[int, tuple[torch.Tensor, ...]]  # by row of the plan that asked: of its tokens

    def fetched(self) -> "Verdict":
        """On its way to the host (device/transfer.py)."""
        if not self.token_ids.is_cuda:
            return self
        token_ids, num_accepted, num_judged, broken = fetch(
            [self.token_ids, self.num_accepted, self.num_judged, self.broken]
        )
        logprobs = {row: tuple(fetch(parts)) for row, parts in self.logprobs.items()}
        return Verdict(self.rows, token_ids, num_accepted, num_judged, broken, logprobs)

    def read(self, num_drafts: torch.Tensor, drafts: torch.Tensor | None) -> Outcome:
        """See Answer."""
        broken = self.broken.to(torch.bool)
        counts = (self.num_accepted + ~broken).tolist()
        token_ids = [line[:n] for line, n in zip(self.token_ids.tolist(), counts, strict=True)]
        kept = dict(zip(self.rows, token_ids, strict=True))
        found, faults = self._logprobs(kept)
        return Outcome(
            token_ids=kept,
            num_judged=dict(zip(self.rows, self.num_judged.tolist(), strict=True)),
            num_drafts=dict(zip(self.rows, num_drafts.tolist(), strict=True)),
            broken={row for row, bad in zip(self.rows, broken.tolist(), strict=True) if bad},
            logprobs=found,
            drafts={} if drafts is None else dict(zip(self.rows, drafts.tolist(), strict=True)),
            faults=faults,
        )

    def _logprobs(self, kept: dict[int, list[int]]) -> tuple[dict[int, list[Logprob]], dict[int, str]]:
        """By row of the plan; and the rows for which that failed."""
        found, faults = {}, {}
        for row, parts in self.logprobs.items():
            try:
                found[row] = to_logprobs(kept[row], *(part[: len(kept[row])] for part in parts))
            except Exception as error:
                faults[row] = f"logprobs: {type(error).__name__}: {error}"
        return found, faults
