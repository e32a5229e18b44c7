"""A step: the order of the ops around the trunk. Executors differ only in how they run it.

recorded.py writes it down as one call into compiled code (CPU), captured.py as a CUDA graph for each bucket,
and eager.py runs it op by op, at any size and with any rules. So operands are tensors here, or views of a
recording; sizes are numbers, or names of numbers.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from hemiola.runtime.config import Resolved
from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed

Operand = Any  # torch.Tensor, or a view of a recording
MARKS = 4  # nanoseconds: begin, behind the trunk, behind the choice, end


class StepState(NamedTuple):
    """What lies on the device from step to step."""

    table: Operand  # [S, P] pages of each slot
    lengths: Operand  # [4, S] (plugins/step/plan.py)
    ids: Operand  # [S, W]
    ring: Operand  # [S, R, F] hidden states of the slots' last tokens, for a drafting head


class Batch(NamedTuple):
    """What `fill` makes: the trunk's inputs (abi.py), and the lines of its logits. int32."""

    rows: Operand  # [N, 8], plugins/rows.py
    page_table: Operand  # [N, P]
    token_ids: Operand  # [T]
    positions: Operand  # [T]
    logits_ids: Operand  # [L] tokens whose logits are wanted
    # int64, for choosing
    line_slot: Operand  # [L]
    line_position: Operand  # [L] of the token that the line chooses


class Forward(NamedTuple):
    """What `Program.forward` makes."""

    batch: Batch
    out: Computed


class Pairs(NamedTuple):
    """A drafting head's inputs (abi.py)."""

    token_ids: Operand
    hidden: Operand
    positions: Operand
    rows: Operand
    page_table: Operand
    logits_ids: Operand


class Chooser(Protocol):
    """How tokens are chosen (choice.py)."""

    def scores(self, out: Computed) -> Operand:
        """What `choose` reads of the trunk's results: logits [L, V], or no more than the best of them."""
        ...

    def choose(self, scores: Operand, batch: Batch) -> Best:
        """The token of each line; its logit, or one of the line that is not finite."""
        ...

    def draft(self, out: Computed, slot: Operand, number: int) -> Operand:
        """Draft `number` of these slots: tokens [D]."""
        ...


class Feed(NamedTuple):
    """What an executor gives to one step."""

    plan: Operand  # [N + 1, 10] (plugins/step/plan.py)
    changes: Operand | None  # [E, 2] of the page table
    marks: Operand  # [MARKS]
    answers: Operand  # [N, width + 4 + told_drafts]
    tokens: Any
    lines: Any
    pairs: Any  # 0: the head reads nothing
    drafting: Any
    width: Any  # most lines of a row
    passes: int  # drafts that a row gets at most
    told_drafts: int  # ids of drafts in the answers
    choice: Chooser


class Drafting(NamedTuple):
    """What one pass of a drafting head leaves for the next."""

    page_table: Operand  # [N, P]
    slot: Operand  # [D]
    hidden: Operand  # [D, F]


class ProgramParts(NamedTuple):
    """The engine's programs, and how places 0, 1, ... are named."""

    trunk: Callable[[Batch], Computed]
    head: Callable[[Pairs], Computed] | None
    places: Callable[[Any], Operand]  # [D] int32: 0, 1, ...


class Program:
    """The ops of a step, bound to an engine's parts and state."""

    def __init__(self, ops: SimpleNamespace, config: Resolved, parts: ProgramParts, state: StepState) -> None:
        self._ops, self._config, self._parts = ops, config, parts
        self._table, *self._ledger, self._ring = state

    def step(self, feed: Feed, forward: "Callable[..., Forward] | None" = None) -> None:
        """All of it. Answers, times and the ledger are written; nothing is returned.

        forward: runs in place of this program's own.
        """
        drafting = self.begin(feed, forward)
        if drafting is not None:
            for number in range(1, feed.passes):
                drafting = self.draft_again(feed, drafting, number)
        self.end(feed)

    def forward(self, plan: Operand, tokens: Any, lines: Any) -> Forward:
        """The trunk, and what it reads."""
        batch = Batch._make(self._ops.fill(plan, self._table, *self._ledger, tokens, lines))
        return Forward(batch, self._parts.trunk(batch))

    def begin(self, feed: Feed, forward: "Callable[..., Forward] | None" = None) -> Drafting | None:
        """Up to the first draft."""
        ops, chunk_len = self._ops, self._config.chunk_len
        ops.mark(feed.marks, 0)
        if feed.changes is not None:
            ops.change(feed.changes, self._table)
        batch, out = (forward or self.forward)(feed.plan, feed.tokens, feed.lines)
        scores = feed.choice.scores(out)
        ops.mark(feed.marks, 1)
        logit, token_id = feed.choice.choose(scores, batch)
        ops.accept(feed.plan, token_id, logit, *self._ledger, feed.answers, feed.width, chunk_len)
        ops.mark(feed.marks, 2)
        match self._config.drafts:
            case "ngram" if feed.passes:
                ops.look_up(feed.plan, *self._ledger, self._config.ngram_min, self._config.ngram_max)
            case "mtp":
                return self._draft_first(feed, batch, out.hidden)
        return None

    def _draft_first(self, feed: Feed, batch: Batch, hidden: Operand) -> Drafting | None:
        """The head reads the step's pairs; behind the last of a row stands its first draft."""
        kept = batch.rows, self._ledger[0], hidden, self._ring
        if isinstance(feed.pairs, int) and feed.pairs == 0:
            self._ops.keep(*kept)
            return None
        sizes = feed.pairs, feed.drafting
        made = self._ops.first_pairs(feed.plan, batch.rows, hidden, self._ring, *self._ledger, *sizes)
        self._ops.keep(*kept)
        rows, token_ids, before, positions, wanted, slot = made
        return self._draft(feed, Pairs(token_ids, before, positions, rows, batch.page_table, wanted), slot, 0)

    def draft_again(self, feed: Feed, drafting: Drafting, number: int) -> Drafting:
        """The head reads draft number - 1 of each row, and the hidden state that it came from."""
        rows, token_ids, positions = self._ops.next_pairs(feed.plan, *self._ledger, number, feed.drafting)
        page_table, slot, hidden = drafting
        wanted = self._parts.places(feed.drafting)
        return self._draft(feed, Pairs(token_ids, hidden, positions, rows, page_table, wanted), slot, number)

    def _draft(self, feed: Feed, pairs: Pairs, slot: Operand, number: int) -> Drafting:
        assert self._parts.head is not None
        out = self._parts.head(pairs)
        if feed.passes:
            chosen = feed.choice.draft(out, slot, number)
            self._ops.write(feed.plan, chosen, *self._ledger, number)
        return Drafting(pairs.page_table, slot, out.hidden)

    def end(self, feed: Feed) -> None:
        """What the host will read."""
        self._ops.tell(feed.plan, *self._ledger, feed.answers, feed.width, feed.told_drafts)
        self._ops.mark(feed.marks, 3)
