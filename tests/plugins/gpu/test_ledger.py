"""A step's ids and lengths on a GPU: what the functions of tensors make of the same numbers."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.gpu.ledger import cuda as kernels
from hemiola.runtime.device.head import Best
from hemiola.runtime.engine.feed import joined
from hemiola.runtime.engine.judge import judge
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.step import Choices
from tests.gpu.laws import DEVICE, on_gpu

pytestmark = on_gpu
SLOTS, IDS, PAGES, CHUNK, MOST = 12, 61, 70, 16, 3


class Step:
    """Random rows of a bucket, some of which are nobody's, and a ledger."""

    def __init__(self, seed: int, num_rows: int = 5, num_live: int = 4, dense: bool = False) -> None:
        print("seed", seed)
        self.rng = torch.Generator().manual_seed(seed)
        config: Any = SimpleNamespace(num_slots=SLOTS, max_len=IDS - MOST - 1, num_drafts=MOST)
        self.ledger = Ledger(config, torch.device(DEVICE))
        self.ledger.ids[1:] = self.ints(0, 3, SLOTS - 1, IDS).int()
        self.ledger.total_len[1:] = total = self.ints(20, IDS - 10, SLOTS - 1)
        self.ledger.committed_len[1:], self.ledger.edge[1:] = total - 1, (total - 1) // CHUNK * CHUNK
        self.ledger.num_drafts[1:] = self.ints(0, MOST + 1, SLOTS - 1)
        self.slots = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        self.slots[:num_live] = torch.randperm(SLOTS - 1, generator=self.rng)[:num_live].to(DEVICE) + 1
        self.drafts = self.ints(0, 1 if dense else MOST + 1, num_rows) * (self.slots > 0)
        num_tokens = (self.drafts + 1) * (self.slots > 0)
        self.width = 1 if dense else 1 + MOST
        self.rows = torch.zeros(num_rows, 8, dtype=torch.int32, device=DEVICE)
        self.rows[:, 0] = torch.arange(num_rows) if dense else num_tokens.cumsum(0) - num_tokens
        self.rows[:, 1], self.rows[:, 2], self.rows[:, 3] = num_tokens, self.drafts, self.slots
        size = num_rows if dense else num_rows * self.width
        self.row, self.offset = torch.zeros(2, size, dtype=torch.int64, device=DEVICE)
        self.line_offset = torch.full((size,), self.width, device=DEVICE)
        lines = [(n, i) for n, num in enumerate(num_tokens.tolist()) for i in range(num)]
        if dense:
            self.row, self.line_offset = torch.arange(size, device=DEVICE), torch.zeros_like(self.row)
        else:
            self.row[: len(lines)], self.offset[: len(lines)] = torch.tensor(lines, device=DEVICE).T
            self.line_offset[: len(lines)] = self.offset[: len(lines)]
        self.table = self.ints(0, 99, SLOTS, PAGES).int()

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.rng).to(DEVICE)

    def lengths(self) -> torch.Tensor:
        return self.ledger.lengths

    def joined(self, rows: torch.Tensor) -> Any:
        choices = Choices(
            rows=list(range(len(self.slots))),
            width=self.width,
            dense=self.width == 1,
            slot_id=self.slots,
            num_drafts=self.drafts,
            row=self.row,
            offset=self.line_offset,
            rules=[],
            asked=[],
        )
        table, none = self.table[self.slots], torch.zeros(0, dtype=torch.int32)
        return joined(self.ledger, rows, self.slots, self.row, self.offset, 1, table, none, choices)


STEPS = pytest.mark.parametrize("step", [(0,), (1, 1, 1), (2, 9, 9), (3, 6, 2), (4, 5, 4, True)], ids=str)


@STEPS
def test_rows_and_tokens_are_filled(step: tuple) -> None:
    made = Step(*step)
    rows = made.rows.clone()
    wanted, ledger = made.joined(rows), made.ledger
    found = kernels.fill(made.rows, made.slots, made.row, made.offset, made.table, ledger.lengths, ledger.ids)
    for mine, theirs in zip(found, (wanted.page_table, wanted.token_ids, wanted.positions), strict=True):
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
    live = made.slots > 0
    assert torch.equal(made.rows[live], rows[live])


@STEPS
def test_choices_are_accepted(step: tuple) -> None:
    made = Step(*step)
    batch, mine = made.joined(made.rows), copy.copy(made.ledger)
    mine.lengths, mine.ids = made.ledger.lengths.clone(), made.ledger.ids.clone()
    chosen = made.ints(0, 3, len(made.row))
    logits = torch.where(made.ints(0, 8, len(made.row)) == 0, torch.nan, 1.0)
    logits = torch.where(made.ints(0, 9, len(made.row)) == 0, -torch.inf, logits)
    told = torch.full((len(made.slots), made.width + 4 + MOST), -7, device=DEVICE)
    kernels.accept(
        made.rows, made.slots, made.drafts, chosen, logits, mine.lengths, mine.ids, told, made.width, CHUNK
    )
    verdict = judge(batch, Best(logits, chosen), made.ledger, CHUNK)
    live, width = made.slots > 0, made.width
    theirs = (verdict.num_accepted, verdict.num_judged, verdict.broken)
    assert torch.equal(told[live, :width], verdict.token_ids[live])
    assert torch.equal(told[live, width : width + 3], torch.stack([part.long() for part in theirs], 1)[live])
    assert torch.equal(mine.lengths[:, 1:], made.ledger.lengths[:, 1:])
    assert torch.equal(mine.ids[1:], made.ledger.ids[1:])
    assert not mine.lengths[:, 0].any() and not mine.ids[0].any()
    drafts = made.ints(0, MOST + 1, SLOTS)
    mine.lengths[3] = drafts
    kernels.tell(made.slots, mine.lengths, mine.ids, told, width, MOST)
    assert torch.equal(told[:, width + 3], drafts[made.slots])
    for n, slot in enumerate(made.slots.tolist()):
        end = int(mine.lengths[0, slot])
        assert told[n, width + 4 :].tolist() == mine.ids[slot, end : end + MOST].tolist()


def test_entries_of_the_page_table_change() -> None:
    table = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10)
    changes = torch.tensor([[13, 7], [39, 8], [0, 0]], device=DEVICE)
    kernels.change(changes, table)
    assert table.view(-1)[[12, 13, 39, 0, 38]].tolist() == [12, 7, 8, 0, 38]
