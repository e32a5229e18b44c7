"""A GPU's steps of fixed sizes: a CUDA graph for each bucket.

What the host knows of a step goes over in one copy to always the same place, and what it reads comes back in
one.
"""

import logging
from typing import Any, NamedTuple

import torch

from hemiola.plugins.step.plan import ANSWERS
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import ALL, FEW_BEST, Group, RuleTable
from hemiola.runtime.device.graphs import Captures, Graphs, Stage
from hemiola.runtime.device.session import Drafter, Trunk
from hemiola.runtime.device.transfer import fetch, upload
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.bucket import (
    ANY,
    DRAWN,
    GREEDY,
    Bucket,
    Buckets,
    Sent,
    buckets_of,
    num_changes,
    num_words,
    send,
    shapes_of,
)
from hemiola.runtime.step.choice import Argmax, ByRules, LogprobLines, Masks
from hemiola.runtime.step.output import StepOutput
from hemiola.runtime.step.pack import Ready
from hemiola.runtime.step.parts import EngineParts, program_of
from hemiola.runtime.step.program import MARKS, Feed

log = logging.getLogger("hemiola")
MAX_TOP = 20  # logprobs of a position


class CapturedResult(NamedTuple):
    """What a step leaves on the device, always in the same place."""

    told: torch.Tensor  # MARKS, then [N, width + 4 + told_drafts] flat, int64
    logprobs: tuple[torch.Tensor, ...]  # of every line, where the bucket has any


class Captured:
    """Runs plans that fit a bucket, by replaying graphs once these are captured."""

    def __init__(self, parts: EngineParts, trunk: Trunk, head: Drafter | None) -> None:
        self._ops, config, ledger, self._table, _ = parts
        self._config, self._ledger = config, ledger
        self.program = program_of(parts, lambda batch: trunk.run(batch), head)
        self.rules = RuleTable(config.num_slots, ledger.device)
        self.buckets = buckets_of(config)
        self._find = Buckets(config)
        self._stage = Stage([self.shapes(bucket) for bucket in self.buckets], ledger.device)
        self._graphs: Graphs[Bucket, CapturedResult] | None = None
        self.num_steps = 0
        self._has_warned = False

    def capture(self, pool: Any, report: Captures) -> Graphs[Bucket, CapturedResult]:
        """From now on steps are replayed. pool: of graphs whose memory these share."""
        device = self._ledger.device
        self._graphs = Graphs(self.step, self.buckets, self.warm, device, pool, report)
        return self._graphs

    def open(self, slot_id: int, rule: Rule) -> None:
        """A request takes the slot."""
        if not self.rules.holds(rule) and not self._has_warned:
            self._has_warned = True  # callers may send as many as they like
            log.warning(
                "a request's bad words, biases or stop ids are more than %s: its steps, and those of others"
                " like it, run without a graph",
                self.rules.HELD,
            )
        self.rules.open(slot_id, rule)

    def fit(self, plan: Plan) -> Bucket | None:
        """The smallest bucket that holds the plan."""
        return self._find(plan)

    @property
    def warm(self) -> list[Bucket]:
        """Steps that between them run every kernel of all: of each size the one with all rules."""
        smallest = self.buckets[-1][1:]
        return [bucket for bucket in self.buckets if bucket.rules == ANY or bucket[1:] == smallest]

    def shapes(self, bucket: Bucket) -> Sent[tuple[tuple[int, ...], type]]:
        """Of what is sent."""
        return shapes_of(bucket, self._config.vocab_size)

    def width(self, bucket: Bucket) -> int:
        """Most lines of a row."""
        return 1 if bucket.is_dense else 1 + self._config.num_drafts

    def told_drafts(self, bucket: Bucket) -> int:
        """Ids of drafts that the host reads."""
        return self._config.num_drafts if bucket.rules == ANY else 0

    def launch(self, plan: Plan, ready: Ready, bucket: Bucket) -> StepOutput:
        """Start a step; its output can be read when a fence behind it has been passed."""
        return self._output(plan, bucket, self.repeat(ready, bucket))

    def repeat(self, ready: Ready, bucket: Bucket) -> CapturedResult:
        """The same where nobody reads it."""
        changes = self._table.changes()
        if len(changes) > num_changes(bucket.rows):
            self._ops.change(*upload(self._ledger.device, changes), self._table.on_device)
            changes = changes[:0]
        words = num_words(self._config.vocab_size)
        self._stage.send(send(ready.packed.numbers, bucket, changes, words, ready.masks))
        self.num_steps += 1
        return self.run(bucket)

    def run(self, bucket: Bucket, /) -> CapturedResult:
        return self.step(bucket) if self._graphs is None else self._graphs.replay(bucket)

    def step(self, bucket: Bucket) -> CapturedResult:
        """The step whose numbers lie on the stage."""
        sent: Sent[torch.Tensor] = Sent(*self._stage.views(self.shapes(bucket)))
        line = self.width(bucket) + ANSWERS + self.told_drafts(bucket)
        told = torch.empty(MARKS + bucket.rows * line, dtype=torch.int64, device=self._ledger.device)
        choice = self._choice(bucket, sent)
        feed = Feed(
            plan=sent.plan,
            changes=sent.changes,
            marks=told,
            answers=told[MARKS:].view(bucket.rows, line),
            tokens=bucket.tokens,
            lines=bucket.tokens,
            pairs=bucket.pairs,
            drafting=bucket.rows,
            width=self.width(bucket),
            passes=bucket.passes,
            told_drafts=self.told_drafts(bucket),
            choice=choice,
        )
        self.program.step(feed)
        return CapturedResult(told, choice.logprobs.get(0, ()) if isinstance(choice, ByRules) else ())

    def _choice(self, bucket: Bucket, sent: Sent[torch.Tensor]) -> "Argmax | ByRules":
        """By the rules that requests left in their slots."""
        if bucket.rules == GREEDY:
            return Argmax(self._ops)

        def group(slot: torch.Tensor, number: int = 0) -> list[Group]:
            max_top_k = FEW_BEST if bucket.rules == DRAWN else ALL
            return [self.rules.group(slot, bucket.rules == ANY, max_top_k)]

        of_ledger = (self._ledger.lengths, self._ledger.ids, self._config.vocab_size)
        if bucket.rules != ANY:
            return ByRules(self._ops, *of_ledger, group, group)
        masks = Masks(None, sent.bits[sent.mask])
        return ByRules(self._ops, *of_ledger, group, group, masks, [LogprobLines(0, slice(None), MAX_TOP)])

    def _output(self, plan: Plan, bucket: Bucket, result: CapturedResult) -> StepOutput:
        """On its way to the host."""
        (told,) = fetch([result.told])
        logprobs, end = {}, 0
        for n, row in enumerate(plan.rows):
            span = slice(end, end := end + row.num_tokens)
            if (num_top := row.rule.params.logprobs) is not None:
                chosen, top_ids, top = (part[span] for part in result.logprobs)
                logprobs[n] = tuple(fetch([chosen, top_ids[:, :num_top], top[:, :num_top]]))
        return StepOutput(plan, told, self.width(bucket), self.told_drafts(bucket), logprobs)
