"""A session without a model that checks all it is given; its next token depends on a row's true context.

It keeps tokens where a model keeps keys, values and states: in the pages and slots that the batch names. The
context of a row is read back from there, so a wrong page, slot, position, length or edge changes tokens or
trips an assert. Fresh and freed places are poisoned.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hemiola.plugins.rows import RowFields, live_rows
from hemiola.plugins.spec import FLOAT
from hemiola.runtime.abi import INPUTS, widths
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.session import Computed
from hemiola.runtime.step.program import Batch

POISON = -1
VOCAB = 97
NextToken = Callable[[Sequence[int]], int | None]  # None: the engine computes NaN


def hashed(context: Sequence[int]) -> int:
    """The default model: any change of any token, or of their order, changes the answer."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def oracle(prompt: Sequence[int], num_tokens: int, next_token: NextToken = hashed) -> list[int]:
    """What greedy decoding must give."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def resolved(**changes: float | str) -> Resolved:
    """Small sizes, with room for every row at max_len."""
    sizes = dict(max_len=64, max_rows=4, max_step_tokens=32, page_len=8, chunk_len=4, num_drafts=0) | dict(
        drafts="none", ngram_min=1, ngram_max=3, prefix_cache=False, snapshot_interval=0
    )
    sizes |= {"pipeline_depth": 0, "adaptive_drafts": False, "cuda_graphs": False, "vocab_size": VOCAB}
    sizes |= {"aging_s": 0.0, "host_cache_bytes": 0, "disk_cache_bytes": 0, "disk_cache_dir": None}
    sizes.update(changes)
    sizes.setdefault("num_pages", sizes["max_rows"] * -(-sizes["max_len"] // sizes["page_len"]) + 1)
    sizes.setdefault("num_slots", sizes["max_rows"] + 1 + 4 * sizes["prefix_cache"])
    return Resolved(**sizes)


def check_inputs(config: Resolved, segment: str, inputs: dict[str, torch.Tensor]) -> None:
    """Names, dtypes and widths are those of the ABI."""
    sizes, most = {"8": 8}, widths(config, segment)
    assert inputs.keys() == INPUTS[segment].keys()
    for name, shape in INPUTS[segment].items():
        dtypes = FLOAT if name == "hidden" else (torch.int32,)
        assert inputs[name].dtype in dtypes and inputs[name].is_contiguous(), name
        for letter, size in zip(shape, inputs[name].shape, strict=True):
            assert sizes.setdefault(letter, size) == size <= most.get(letter, size), (
                f"{name}: {size} {letter}"
            )
    if not inputs["rows"].is_cuda:  # looking there would wait
        for first, num_tokens, _, _, committed, *_ in inputs["rows"].tolist():
            assert inputs["positions"][first : first + num_tokens].tolist() == [
                *range(committed, committed + num_tokens)
            ]


def nothing() -> None: ...


class FakeUnits:
    """Stands for HostUnits: a unit holds a page's tokens, or, as all of a snapshot's, its state."""

    units_per_slot = 3  # of an engine with recurrences

    def __init__(self, session: "FakeSession", num_units: int) -> None:
        self.session, self.num_units = session, num_units
        self.units_per_slot *= session.hybrid
        self.content: list[list[int] | None] = [None] * num_units
        self._coming: list[Callable[[], None]] = []  # copies, none of which is done before a step is held
        self._polls: dict[int, int] = {}  # by mark: so often it has not come yet
        self._ends: dict[int, int] = {}  # by mark: its copies are those before
        self.lateness: Callable[[int], int] = lambda number: number * 7 % 5  # by mark: polls

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None:
        for page_id, unit in zip(page_ids, units, strict=True):
            page = self.session.pages[page_id].tolist()
            assert POISON not in page, f"page {page_id} is kept before it was written"
            self.content[unit] = page

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None:
        assert len(units) == self.units_per_slot and self.session.states[slot_id] is not None
        for unit in units:
            self.content[unit] = self.session.states[slot_id]

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None:
        contents = [self.content[unit] for unit in units]  # units may be written again behind this

        def copy() -> None:
            for content, page_id in zip(contents, page_ids, strict=True):
                assert self.session.may_write(page_id), f"page {page_id} is another's"
                self.session.pages[page_id] = content

        self._coming.append(copy)

    def load_slot(self, units: Sequence[int], slot_id: int) -> None:
        assert len(units) == self.units_per_slot
        content = self.content[units[-1]]

        def copy() -> None:
            self.session.states[slot_id] = content

        self._coming.append(copy)

    def mark(self) -> int:
        number = len(self._polls) + 1
        self._polls[number] = self.lateness(number)
        self._ends[number] = len(self._coming)
        return number

    def has_come(self, number: int) -> bool:
        self._polls[number] -= 1
        return self._polls[number] < 0

    def hold(self, number: int) -> None:
        end = self._ends.pop(number)  # once for each mark
        for n, copy in enumerate(self._coming[:end]):
            copy()
            self._coming[n] = nothing

    unit_bytes = 1024

    def get(self, unit: int) -> bytes:
        return json.dumps(self.content[unit]).encode().ljust(self.unit_bytes)

    def fill(self, unit: int, read: Callable[[memoryview], bool]) -> bool:
        room = bytearray(self.unit_bytes)
        if not read(memoryview(room)):
            return False
        self.content[unit] = json.loads(room)
        return True

    def settled(self) -> Callable[[], None]:
        return lambda: None


def _logits_of(hidden: torch.Tensor) -> torch.Tensor:
    """Of what follows each token."""
    logits = torch.zeros(len(hidden), VOCAB)
    for line, answer in zip(logits, hidden[:, 0].tolist(), strict=True):
        line[slice(None) if answer != answer else int(answer)] = torch.nan if answer != answer else 1.0
    return logits


class OneRank:
    """Stands for a Session of one rank, whose programs are not compiled."""

    recordings, ranks, slowest = (), None, None


class FakeSession(OneRank):
    """Stands for Session and for Storage."""

    def __init__(self, config: Resolved, next_token: NextToken = hashed, hybrid: bool = True) -> None:
        self.config = config
        self.next_token = next_token
        self.hybrid = hybrid  # else there are no snapshots, and a state is what the pages say
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

    def host_units(self, num_bytes: int) -> FakeUnits:
        """A unit is a byte here."""
        return FakeUnits(self, num_bytes)

    def copy_slot(self, source: int, target: int) -> None:
        assert self.states[source] is not None, f"slot {source} holds no state"
        self.copies.append((source, target))
        self.states[target] = self.states[source]
        self.records[target] = self.records[source]

    def run(self, batch: Batch) -> Computed:
        self.before_run(batch)
        self._check(batch)
        rows = live_rows(batch.rows, self.config.chunk_len)
        assert len(rows) == len(batch.rows), "a row without tokens or slot"
        self.shapes.append(tuple(row.num_tokens for row in rows))
        written: set[int] = set()
        answers: dict[int, int | None] = {}  # by token of the step
        end = 0
        for row, table in zip(rows, batch.page_table.tolist(), strict=True):
            assert row.first == end, "tokens of nobody, or of two rows"
            end += row.num_tokens
            context = self._context(row, table)
            for token in range(row.first, end):
                context.append(int(batch.token_ids[token]))
                assert batch.positions[token] == len(context) - 1, f"{row}: wrong position"
                page_id, offset = self._place(table, len(context) - 1)
                assert self.may_write(page_id), f"{row}: writes to page {page_id}"
                self.pages[page_id, offset] = context[-1]
                written.add(page_id)
                answers[token] = self.next_token(context)
            self._store_slot(row, context)
        assert end == len(batch.token_ids), "tokens of nobody"
        holders = Counter(page_id for table in batch.page_table.tolist() for page_id in set(table))
        assert all(holders[page_id] == 1 for page_id in written), "a row writes a page of another"
        logits = torch.zeros(len(batch.logits_ids), VOCAB)
        for at, token in enumerate(batch.logits_ids.tolist()):
            answer = answers[token]
            logits[at, slice(None) if answer is None else answer] = torch.nan if answer is None else 1.0
        return Computed(logits, torch.zeros(end, 1))

    def run_all(self, batch: Batch) -> Computed:
        """A token's hidden state is what follows it: NaN, where that is what is computed."""
        plain, found = self.next_token, []

        def note(context: Sequence[int]) -> int | None:
            found.append(plain(context))
            return found[-1]

        self.next_token = note
        try:
            lines = self.run(batch).logits
        finally:
            self.next_token = plain
        hidden = torch.tensor([[torch.nan if answer is None else answer] for answer in found])
        return Computed(lines, hidden, None, _logits_of)

    def _check(self, batch: Batch) -> None:
        """Inputs are those of the ABI, and no two rows meet in a slot."""
        check_inputs(self.config, "trunk", {name: getattr(batch, name) for name in INPUTS["trunk"]})
        targets = [slot for slot in batch.rows[:, [3, 6]].flatten().tolist() if slot]
        assert len(targets) == len(set(targets)), "two rows in one slot, or a snapshot in another's"
        assert all(0 < slot < self.config.num_slots for slot in targets)

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.config.page_len], position % self.config.page_len

    def _context(self, row: RowFields, table: list[int]) -> list[int]:
        """The row's committed tokens, as its pages have them and as its slot has them: they must agree."""
        ring_len = self.records.shape[1]
        assert row.committed - row.edge < ring_len, f"{row}: its records do not fit the ring"
        paged = [int(self.pages[self._place(table, position)]) for position in range(row.committed)]
        ring = [int(self.records[row.slot, p % ring_len]) for p in range(row.edge, row.committed)]
        state = self.states[row.slot] if row.edge and self.hybrid else paged[: row.edge]
        assert state is not None, f"{row}: reads a state that was never written"
        assert POISON not in paged and POISON not in ring, f"{row}: reads what was never written"
        assert paged == state + ring, f"{row}: pages and slot disagree"
        return paged

    def _store_slot(self, row: RowFields, context: list[int]) -> None:
        if row.snapshot_slot:
            assert self.states[row.snapshot_slot] is None, f"{row}: a snapshot over another"
            self.states[row.snapshot_slot] = context[: row.snapshot_edge]
        self.states[row.slot] = context[: row.new_edge]
        for position in range(row.new_edge, len(context)):
            self.records[row.slot, position % self.records.shape[1]] = context[position]
