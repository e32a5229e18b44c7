"""Steps of fixed sizes from tensors to tensors: fill, run, judge and propose without a number of the host.

What the host knows of a step goes over in one copy to always the same place, and what it learns comes back
in one. Between them is `step`, which a graph can hold: everything else lies on the device, by slot.
"""

import logging
from array import array
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.graphs import Stage, mark
from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Trunk
from hemiola.runtime.device.transfer import fetch, upload
from hemiola.runtime.engine.bucket import (
    ANY,
    DRAWN,
    GREEDY,
    Bucket,
    Fed,
    Fit,
    buckets_of,
    num_changes,
    pack,
    shapes_of,
)
from hemiola.runtime.engine.drafts import Proposer
from hemiola.runtime.engine.feed import joined
from hemiola.runtime.engine.judge import judge, scores_of
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.rules import ALL, FEW_BEST, Group, RuleTable
from hemiola.runtime.engine.step import Answer, Batch, Choices, Masks, Plan, Verdict

log = logging.getLogger("hemiola")
MARKS = 4  # nanoseconds: begin, behind the trunk, behind the choice, end
TOLD = 4  # of each row, behind its tokens: accepted, judged, broken, drafts of the next step (then these)
MOST_TOP = 20  # logprobs of a position


class Done(NamedTuple):
    """What a step leaves on the device, always in the same place."""

    told: torch.Tensor  # MARKS and [N, width + TOLD] flat, int64
    logprobs: tuple[torch.Tensor, ...]  # of every line, where the bucket has any


class Marks:
    """Seconds of the device between the marks of a step; to be read behind a fence."""

    def __init__(self, told: "torch.Tensor | array[int]") -> None:
        self._told = told

    def seconds(self, mark: int) -> float:
        """From this mark to the next."""
        start, end = self._told[mark : mark + 2].tolist()
        return (end - start) / 1e9


class Steps(Protocol):
    """Steps as one launch: a Decoder's of fixed sizes for a GPU, or a CPU's (recorded.py)."""

    def open(self, slot_id: int, rule: Rule) -> None:
        """A request takes the slot."""
        ...

    def fit(self, plan: Plan) -> Any:
        """What `launch` needs of a plan; None: its parts must be run one by one."""
        ...

    def launch(self, plan: Plan, fitted: Any, /) -> "Told":
        """Start a step; what it finds can be read when a fence behind it has been passed."""
        ...


class Told(NamedTuple):
    """What the host learns of a step."""

    verdict: Answer
    num_drafts: torch.Tensor  # [R] proposed for the next step
    drafts: torch.Tensor | None  # [R, K] and these, if a row follows a grammar
    marks: Marks


class Decoder:
    """Runs plans that fit a bucket. `run` may be replaced by something that replays `step`."""

    def __init__(
        self, config: Resolved, ledger: Ledger, pages: PagePool, session: Trunk, drafts: Proposer
    ) -> None:
        self.config, self.ledger, self.pages = config, ledger, pages
        self.session, self.drafts = session, drafts
        self.rules = RuleTable(config.num_slots, ledger.device)
        self.buckets = buckets_of(config)
        self.fit = Fit(config)
        self.num_steps = 0
        pages.changes = {}
        self._table = torch.zeros(pages.table.shape, dtype=torch.int32, device=ledger.device)
        most = max(bucket.tokens for bucket in self.buckets)
        self._lines = torch.arange(most, dtype=torch.int32, device=ledger.device)  # each token's logits
        self._stage = Stage([self.shapes(bucket) for bucket in self.buckets], ledger.device)

    def open(self, slot_id: int, rule: Rule) -> None:
        """A request takes the slot."""
        if not self.rules.holds(rule):
            log.warning(
                "a request's bad words, biases or stop ids are more than %s: its steps run without a graph",
                self.rules.HELD,
            )
        self.rules.open(slot_id, rule)

    @property
    def warm(self) -> list[Bucket]:
        """Steps that between them run every kernel of all: of each size the one with all rules."""
        smallest = self.buckets[-1][1:]
        return [bucket for bucket in self.buckets if bucket.rules == ANY or bucket[1:] == smallest]

    def shapes(self, bucket: Bucket) -> Fed[tuple[tuple[int, ...], type]]:
        """Of what is fed."""
        return shapes_of(bucket, self.config.vocab_size)

    def width(self, bucket: Bucket) -> int:
        """Most tokens of a row."""
        return 1 if bucket.is_dense else 1 + self.config.num_drafts

    def launch(self, plan: Plan, bucket: Bucket) -> Told:
        """Start a step; what it finds can be read when a fence behind it has been passed."""
        changes = self._changes(num_changes(bucket.rows))
        self._stage.send(pack(plan, bucket, self.width(bucket), self.config.vocab_size, changes))
        done = self.run(bucket)
        self.num_steps += 1
        return self._told(plan, bucket, done)

    def run(self, bucket: Bucket, /) -> Done:
        return self.step(bucket)

    def _changes(self, most: int) -> dict[int, int]:
        """Changes of the page table since the last step, if a bucket holds them; else they go over now."""
        changes, self.pages.changes = self.pages.changes or {}, {}
        if len(changes) <= most:
            return changes
        made = np.array(list(changes.items()), np.int64)
        (there,) = upload(self.ledger.device, made)
        self._change(there)
        return {}

    def _change(self, changes: torch.Tensor) -> None:
        self._table.view(-1)[changes[:, 0]] = changes[:, 1].to(torch.int32)

    def step(self, bucket: Bucket) -> Done:
        """The step whose numbers lie on the stage."""
        ledger = self.ledger
        fed: Fed[torch.Tensor] = Fed(*self._stage.views(self.shapes(bucket)))
        most = self._num_told(bucket)
        told = torch.empty(MARKS + bucket.rows * most, dtype=torch.int64, device=ledger.device)
        mark(told, 0)
        self._change(fed.changes)
        batch = self._fill(bucket, fed)
        out = self.session.run(batch)
        scores = scores_of(batch, out)
        mark(told, 1)
        answers = told[MARKS:].view(bucket.rows, most)
        logprobs = self._judge(bucket, batch, scores, answers)
        mark(told, 2)
        rules = [] if bucket.rules == GREEDY else [self._group(bucket, fed.slot)]
        self.drafts.propose_fed(bucket, fed, batch, out.hidden, rules)
        self._tell(bucket, fed.slot, answers)
        mark(told, 3)
        return Done(told, logprobs)

    def _judge(
        self, bucket: Bucket, batch: Batch, scores: torch.Tensor | Best, answers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tokens, accepted, judged and broken into the answers; returns logprobs, if the bucket has any."""
        verdict = judge(batch, scores, self.ledger, self.config.chunk_len)
        lines = (verdict.num_accepted, verdict.num_judged, verdict.broken)
        columns = [verdict.token_ids, *(line.unsqueeze(1).to(torch.int64) for line in lines)]
        answers[:, : self.width(bucket) + len(lines)] = torch.cat(columns, 1)
        return verdict.logprobs.get(0, ())

    def _tell(self, bucket: Bucket, slot: torch.Tensor, answers: torch.Tensor) -> None:
        """What is proposed for the next step into the answers."""
        end = self.width(bucket) + TOLD
        answers[:, end - 1] = self.ledger.num_drafts[slot]
        if bucket.rules == ANY:
            answers[:, end:] = self.ledger.drafts(slot, self.config.num_drafts)
        self.ledger.empty_dump()

    def _fill(self, bucket: Bucket, fed: Fed[torch.Tensor]) -> Batch:
        rules = []
        if bucket.rules != GREEDY:
            rules = [self._group(bucket, fed.slot[fed.line_row])]
        choices = Choices(
            rows=list(range(bucket.rows)),
            width=self.width(bucket),
            dense=bucket.is_dense,
            slot_id=fed.slot,
            num_drafts=fed.num_drafts,
            row=fed.line_row,
            offset=fed.line_offset,
            rules=rules,
            asked=[(0, slice(None), MOST_TOP)] if bucket.rules == ANY else [],
        )
        masks = Masks(None, fed.bits[fed.mask]) if bucket.rules == ANY else None
        return replace(self._join(fed, self._lines[: bucket.tokens], choices), masks=masks)

    def _join(self, fed: Fed[torch.Tensor], lines: torch.Tensor, choices: Choices) -> Batch:
        """What the host knows of a step, with what the ledger knows."""
        table = self._table[fed.slot]
        return joined(self.ledger, fed.rows, fed.slot, fed.row, fed.offset, 1, table, lines, choices)

    def _group(self, bucket: Bucket, slot: torch.Tensor) -> Group:
        """How lines of these slots are chosen."""
        return self.rules.group(slot, bucket.rules == ANY, FEW_BEST if bucket.rules == DRAWN else ALL)

    def _num_told(self, bucket: Bucket) -> int:
        """Numbers that the host is told of a row."""
        return self.width(bucket) + TOLD + (self.config.num_drafts if bucket.rules == ANY else 0)

    def _told(self, plan: Plan, bucket: Bucket, done: Done) -> Told:
        """On its way to the host."""
        (told,) = fetch([done.told])
        num, width = len(plan.rows), self.width(bucket)
        lines = told[MARKS:].view(bucket.rows, self._num_told(bucket))[:num]
        found, end = {}, 0
        for n, row in enumerate(plan.rows):
            own = slice(end, end := end + row.num_tokens)
            if row.request.params.logprobs is not None:
                chosen, top_ids, top = (part[own] for part in done.logprobs)
                num_top = row.request.params.logprobs
                found[n] = tuple(fetch([chosen, top_ids[:, :num_top], top[:, :num_top]]))
        verdict = Verdict(
            rows=list(range(num)),
            token_ids=lines[:, :width],
            num_accepted=lines[:, width],
            num_judged=lines[:, width + 1],
            broken=lines[:, width + 2],
            logprobs=found,
        )
        is_guided = any(row.request.guide is not None for row in plan.rows)
        drafts = lines[:, width + TOLD :] if is_guided else None
        return Told(verdict, lines[:, width + 3], drafts, Marks(told))
