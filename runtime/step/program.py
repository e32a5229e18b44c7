"""A step: the order of the ops around the trunk. Executors differ only in how they run it.

A decode step on a GPU, for example:
1. The host packs the plan, one line for a row (plugins/step/plan.py), and copies it to the device together
   with the entries of the page table that changed (captured.py, `launch`).
2. It replays a CUDA graph: `Program.step`, captured when the engine was opened, for the smallest bucket of
   sizes (bucket.py) that holds the plan. The graph launches, in this order, what the table below lists.
3. One copy brings `answers` back. The host reads them pipeline_depth steps later (output.py).

The ops stand in plugins/step. They read the plan, which says what each row owns (tokens, lines of logits,
pairs, drafts), and the ledger, which has every slot's token ids and lengths; `keep` reads only the ledger,
`change` and `mark` neither. trunk, choose and head are the engine's programs and the chooser (choice.py).

op           also reads                        writes
change       changes                           the page table
fill         the page table                    the trunk's inputs: each row's uncommitted tokens and drafts
trunk        Batch                             logits of each line (or the best token), hidden states
choose       logits                            a token for each line
accept       the chosen tokens                 ledger: the drafts that equal them and the token behind become
                                               text, lengths grow; answers: the chosen tokens, how many drafts
                                               were judged and accepted
look_up      -                                 ledger: drafts from earlier text (drafts = "ngram")
first_pairs  hidden states, the ring           the head's inputs (drafts = "mtp"); ledger: number of drafts
keep         hidden states                     the ring: hidden states of each slot's last tokens
head         Pairs                             logits, hidden states
write        the head's choice                 ledger: one draft of each row
next_pairs   -                                 the head's inputs for the next draft, one pair for each row
tell         -                                 answers: the number of drafts for the next step, and their ids
mark         the clock                         marks: when the device came to a place

head, write and next_pairs repeat for each draft. A pair is a token and the hidden state of the token before
it: what a drafting head reads. It needs pairs of all tokens, as attention needs all keys; pairs that earlier
steps left out (they are owed) come with this step's, their hidden states from the ring.

captured.py runs steps so. recorded.py records the same program as one call into compiled code (CPU), and
eager.py runs it op by op, at any size and with any rules. So an operand is a tensor here, or a view of a
recording, and a size is a number, or a name for a number that each call brings.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from hemiola.runtime.config import Resolved
from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed

Operand = Any  # torch.Tensor, or a view of a recording
MARKS = 4  # times in nanoseconds: begin, after the trunk, after accept, end


class StepState(NamedTuple):
    """What lies on the device from step to step."""

    table: Operand  # [S, P] pages of each slot
    # the ledger
    lengths: Operand  # [4, S] tokens: of the text, committed, up to the state's edge; drafts behind the text
    ids: Operand  # [S, W] the text, then drafts
    ring: Operand  # [S, R, F] hidden states of each slot's last tokens, for a drafting head


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
    # [N, width + 4 + told_drafts]: chosen tokens; drafts accepted, drafts judged, whether logits were broken,
    # drafts of the next step; their ids
    answers: Operand
    # sizes, padding included
    tokens: Any  # T
    lines: Any  # L, of logits
    pairs: Any  # that the head reads; 0: it reads nothing
    drafting: Any  # D, rows that the head drafts for
    width: Any  # most lines of a row
    passes: int  # drafts that a row gets at most; 0: the head reads its pairs and drafts nothing
    told_drafts: int  # ids of drafts in the answers; 0 where the host does not need them
    choice: Chooser


class Drafting(NamedTuple):
    """What one pass of a drafting head leaves for the next."""

    page_table: Operand  # [N, P]
    slot: Operand  # [D]
    hidden: Operand  # [D, F]


class ProgramParts(NamedTuple):
    """The engine's programs."""

    trunk: Callable[[Batch], Computed]
    head: Callable[[Pairs], Computed] | None
    places: Callable[[Any], Operand]  # of a size D: [D] int32, 0, 1, ...


class Program:
    """The ops of a step, bound to an engine's parts and state."""

    def __init__(self, ops: SimpleNamespace, config: Resolved, parts: ProgramParts, state: StepState) -> None:
        self._ops, self._config, self._parts = ops, config, parts
        self._table, *self._ledger, self._ring = state

    def step(self, feed: Feed, forward: "Callable[..., Forward] | None" = None) -> None:
        """All of it. It writes answers, times and what lies on the device, and returns nothing.

        forward: runs instead of `self.forward`, for a prompt whose forward is a graph (prompts.py).
        """
        drafting = self.begin(feed, forward)
        if drafting is not None:
            for number in range(1, feed.passes):
                drafting = self.draft_again(feed, drafting, number)
        self.end(feed)

    def forward(self, plan: Operand, tokens: Any, lines: Any) -> Forward:
        """The trunk's inputs and its results."""
        batch = Batch._make(self._ops.fill(plan, self._table, *self._ledger, tokens, lines))
        return Forward(batch, self._parts.trunk(batch))

    def begin(self, feed: Feed, forward: "Callable[..., Forward] | None" = None) -> Drafting | None:
        """Everything up to the first draft."""
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
        """The head reads the step's pairs. Its output for the last pair of a row is the row's first draft.

        `keep` comes after `first_pairs`, because it overwrites states of the ring that `first_pairs` reads.
        """
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
        """The head reads draft number - 1 of each row and the hidden state that it came from."""
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
