"""A session without a model that checks all it is given; its next token depends on a row's true context.

It keeps tokens where a model keeps keys, values and states: in the pages and slots that the batch names. The
context of a row is read back from there, so a wrong page, slot, position, length or edge changes tokens or
trips an assert. Fresh and freed places are poisoned.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hemiola.plugins.spec import next_edge
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine.step import Batch

POISON = -1
VOCAB = 97
NextToken = Callable[[Sequence[int]], int]


def hashed(context: Sequence[int]) -> int:
    """The default model: any change of any token, or of their order, changes the answer."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def oracle(prompt: Sequence[int], num_tokens: int, next_token: NextToken = hashed) -> list[int]:
    """What greedy decoding must give."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def resolved(**changes: int | str) -> Resolved:
    """Small sizes, with room for every row at max_len."""
    sizes = dict(
        max_len=64, max_rows=4, max_step_tokens=32, page_len=8, chunk_len=4, num_drafts=0, pad_tokens=1
    ) | dict(drafts="none", ngram_min=1, ngram_max=3, prefix_cache=False, snapshot_interval=0)
    sizes |= {"pipeline_depth": 0, "adaptive_drafts": False}
    sizes.update(changes)
    sizes.setdefault("num_pages", sizes["max_rows"] * -(-sizes["max_len"] // sizes["page_len"]) + 1)
    sizes.setdefault("num_slots", sizes["max_rows"] + 1 + 4 * sizes["prefix_cache"])
    return Resolved(**sizes)


class FakeSession:
    """Stands for Session and for Storage."""

    def __init__(self, config: Resolved, next_token: NextToken = hashed, hybrid: bool = True) -> None:
        self.config = config
        self.next_token = next_token
        self.hybrid = hybrid  # else a state is what the pages say
        self.pages = np.full((config.num_pages, config.page_len), POISON, np.int64)
        self.states: list[list[int] | None] = [None] * config.num_slots  # the tokens before the slot's edge
        self.records = np.full((config.num_slots, config.chunk_len + config.num_drafts), POISON, np.int64)
        self.shapes: list[tuple[int, ...]] = []  # tokens per row, of every step
        self.copies: list[tuple[int, int]] = []  # slots: from, to
        self.before_run: Callable[[Batch], None] = lambda batch: None
        self.may_write: Callable[[int], bool] = lambda page_id: page_id != 0

    def free_pages(self, page_ids: list[int]) -> None:
        self.pages[page_ids] = POISON

    def free_slots(self, slot_ids: list[int]) -> None:
        for slot_id in slot_ids:
            self.states[slot_id] = None
            self.records[slot_id] = POISON

    def copy_slot(self, source: int, target: int) -> None:
        assert self.states[source] is not None, f"slot {source} holds no state"
        self.copies.append((source, target))
        self.states[target] = self.states[source]
        self.records[target] = self.records[source]

    def run(self, batch: Batch) -> Computed:
        self.before_run(batch)
        self._check_shapes(batch)
        cu_tokens = batch.cu_tokens.tolist()
        self.shapes.append(tuple(b - a for a, b in itertools.pairwise(cu_tokens)))
        written: set[int] = set()
        answers: dict[int, int] = {}  # by token of the step
        for row in range(len(cu_tokens) - 1):
            first, end = cu_tokens[row], cu_tokens[row + 1]
            if batch.slot_id[row] == 0:
                self._check_dump_row(batch, row)
                continue
            context = self._context(batch, row)
            for token in range(first, end):
                context.append(int(batch.token_ids[token]))
                assert batch.positions[token] == len(context) - 1, f"row {row}: wrong position"
                page_id, offset = self._place(batch, row, len(context) - 1)
                assert self.may_write(page_id), f"row {row}: writes to page {page_id}"
                self.pages[page_id, offset] = context[-1]
                written.add(page_id)
                answers[token] = self.next_token(context)
            self._store_slot(batch, row, context)
        holders = Counter(page_id for table in batch.page_table.tolist() for page_id in set(table))
        assert all(holders[page_id] == 1 for page_id in written), "a row writes a page of another"
        logits = torch.zeros(len(batch.logits_ids), VOCAB)
        for at, token in enumerate(batch.logits_ids.tolist()):
            logits[at, answers[token]] = 1.0
        return Computed(logits, torch.zeros(cu_tokens[-1], 1))

    def _check_shapes(self, batch: Batch) -> None:
        num_tokens, num_rows = len(batch.token_ids), len(batch.slot_id)
        assert num_tokens > 0 and num_tokens % self.config.pad_tokens == 0
        assert (
            num_tokens <= -(-self.config.max_step_tokens // self.config.pad_tokens) * self.config.pad_tokens
        )
        assert len(batch.positions) == num_tokens and len(batch.cu_tokens) == num_rows + 1
        assert batch.cu_tokens[0] == 0 and batch.cu_tokens[-1] == num_tokens
        assert (batch.cu_tokens.diff() > 0).all(), "a row without tokens"
        for name in ("committed", "edge", "num_drafts", "snapshot_slot", "snapshot_edge"):
            assert getattr(batch, name).shape == (num_rows,), name
        for name in ("token_ids", "positions", "cu_tokens", "logits_ids", "slot_id", "page_table", "edge"):
            tensor = getattr(batch, name)
            assert tensor.dtype == torch.int32 and tensor.is_contiguous(), name
        live = batch.slot_id[batch.slot_id > 0]
        assert len(live) == len(live.unique()) <= self.config.max_rows, "two rows in one slot"
        targets = [*live.tolist(), *batch.snapshot_slot[batch.snapshot_slot > 0].tolist()]
        assert len(targets) == len(set(targets)), "a snapshot goes where something else is written"
        assert (batch.slot_id >= 0).all() and (batch.slot_id < self.config.num_slots).all()

    def _check_dump_row(self, batch: Batch, row: int) -> None:
        assert row == len(batch.slot_id) - 1, "the dump row comes last"
        span = slice(int(batch.cu_tokens[row]), int(batch.cu_tokens[row + 1]))
        assert not batch.positions[span].any() and not batch.page_table[row].any()
        assert batch.committed[row] == 0 and batch.edge[row] == 0

    def _place(self, batch: Batch, row: int, position: int) -> tuple[int, int]:
        page_len = self.config.page_len
        return int(batch.page_table[row, position // page_len]), position % page_len

    def _context(self, batch: Batch, row: int) -> list[int]:
        """The row's committed tokens, as its pages have them and as its slot has them: they must agree."""
        committed, edge, slot_id = (int(t[row]) for t in (batch.committed, batch.edge, batch.slot_id))
        assert edge % self.config.chunk_len == 0 and edge <= committed
        assert committed - edge < self.records.shape[1], (
            f"row {row}: {committed - edge} records do not fit the ring"
        )
        paged = [int(self.pages[self._place(batch, row, position)]) for position in range(committed)]
        ring = [int(self.records[slot_id, p % self.records.shape[1]]) for p in range(edge, committed)]
        state = self.states[slot_id] if edge and self.hybrid else paged[:edge]
        assert state is not None, f"row {row}: reads a state that was never written"
        assert POISON not in paged and POISON not in ring, f"row {row}: reads what was never written"
        assert paged == state + ring, f"row {row}: pages and slot disagree"
        return paged

    def _store_slot(self, batch: Batch, row: int, context: list[int]) -> None:
        committed, slot_id, num_drafts = (
            int(t[row]) for t in (batch.committed, batch.slot_id, batch.num_drafts)
        )
        edge, new_edge = (
            int(batch.edge[row]),
            next_edge(committed, len(context) - committed, num_drafts, self.config.chunk_len),
        )
        target, snapshot_edge = int(batch.snapshot_slot[row]), int(batch.snapshot_edge[row])
        assert snapshot_edge % self.config.chunk_len == 0
        if target and edge < snapshot_edge <= new_edge:
            assert self.states[target] is None, f"row {row}: a snapshot over another"
            self.states[target] = context[:snapshot_edge]
        self.states[slot_id] = context[:new_edge]
        for position in range(new_edge, len(context)):
            self.records[slot_id, position % self.records.shape[1]] = context[position]
