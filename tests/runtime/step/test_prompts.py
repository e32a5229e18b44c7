"""Prompts in fixed sizes: which there are, what the trunk reads, and what of its results a step gets."""

import pytest
import torch
from kit.fake_session import resolved

from hemiola.plugins.step import forms
from hemiola.plugins.step.plan import PlanFields
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.device.session import Computed
from hemiola.runtime.step import prompts as module
from hemiola.runtime.step.ledger import Ledger
from hemiola.runtime.step.parts import EngineParts
from hemiola.runtime.step.program import Batch
from hemiola.runtime.step.prompts import Prompts, Size, sizes_of
from hemiola.runtime.step.table import PageTable

CPU = torch.device("cpu")
SIZES = {"max_len": 4096, "max_rows": 20, "max_step_tokens": 300, "num_drafts": 3}


class Noting:
    """A trunk that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Batch] = []

    def run(self, batch: Batch) -> Computed:
        given = Batch(*(part.clone() for part in batch))
        self.given.append(given)
        return Computed(given.logits_ids[:, None] * 1.0, given.token_ids[:, None] * 1.0)


def made(trunk: Noting, **changes: int) -> Prompts:
    """Of an engine whose slots hold texts."""
    config = resolved(**SIZES | changes)
    ledger = Ledger(config, CPU)
    ledger.ids[1:] = torch.randint(1, 99, (config.num_slots - 1, ledger.ids.shape[1]))
    ledger.lengths[:3, 1:] = torch.randint(1, 99, (config.num_slots - 1,))
    pages = PagePool(config.num_pages, config.page_len, config.num_slots, config.max_len // config.page_len)
    pages.table[1:] = torch.randint(1, 99, pages.table[1:].shape).numpy()
    return Prompts(
        EngineParts(forms("compiled"), config, ledger, PageTable(pages, CPU, False), torch.empty(0)), trunk
    )


def plan_of(num_tokens: int, num_rows: int, num_lines: int) -> torch.Tensor:
    """The first row has the tokens that are left, and so the lines."""
    lines, token, line = [], 0, 0
    for n in range(num_rows):
        lines.append(PlanFields(token, line, 0, 0, 1 + n, 0, 0, 0, 0, 0))
        token += 1 if n else num_tokens - num_rows + 1
        line += (num_lines - num_rows + 1 if n == 0 else 1) if num_lines >= num_rows else num_lines * (n == 0)
    lines.append(PlanFields(token, line, 0, 0, 0, 0, 0, 0, 0, 0))
    assert (token, line) == (num_tokens, num_lines)
    return torch.tensor(lines, dtype=torch.int32)


def test_sizes_of_an_engine() -> None:
    sizes = sizes_of(resolved(**SIZES))
    assert [size for size in sizes if size.tokens in (64, 300)] == [
        (64, 1, 0), (64, 1, 1), (64, 8, 32), (64, 20, 64),
        (300, 1, 0), (300, 1, 1), (300, 8, 32), (300, 20, 80),
    ]  # fmt: skip
    assert {size.tokens for size in sizes} == {64, 128, 192, 256, 300}
    assert max(size.tokens for size in sizes_of(resolved(**SIZES | {"max_step_tokens": 8192}))) == 4096
    assert set(sizes_of(resolved(max_rows=1, max_step_tokens=8, num_drafts=0))) == {(8, 1, 0), (8, 1, 1)}


@pytest.mark.parametrize(
    ("step", "size"),
    [
        ((5, 1, 0), Size(64, 1, 0)),
        ((64, 1, 1), Size(64, 1, 1)),
        ((65, 2, 1), Size(128, 8, 32)),
        ((64, 9, 33), Size(64, 20, 64)),
        ((300, 20, 80), Size(300, 20, 80)),
        ((12, 1, 4), Size(64, 8, 32)),
    ],
    ids=str,
)
def test_a_step_gets_the_smallest_size_and_its_own_results(step: tuple[int, int, int], size: Size) -> None:
    """Nothing of an earlier, larger step is left: a stale id of a logit lies outside."""
    trunk = Noting()
    prompts = made(trunk)
    prompts.forward(plan_of(300, 20, 80), 300, 80)
    plan = plan_of(*step)
    batch, out = prompts.forward(plan, step[0], step[2])
    padded = trunk.given[-1]
    assert (len(padded.token_ids), len(padded.rows), len(padded.logits_ids)) == size
    alone = prompts._program.forward(plan, step[0], step[2])
    for whole, part, wanted in zip(padded, batch, alone.batch, strict=True):
        assert torch.equal(part, wanted) and torch.equal(whole[: len(part)], wanted)
    assert not padded.token_ids[step[0] :].any() and not padded.logits_ids[step[2] :].any()
    assert not padded.rows[step[1] :, 1:].any()
    assert torch.equal(out.logits, alone.out.logits) and torch.equal(out.hidden, alone.out.hidden)


@pytest.mark.parametrize("step", [(301, 1, 1), (64, 21, 1), (300, 20, 81)], ids=str)
def test_a_step_that_fits_no_size_runs_as_it_is(step: tuple[int, int, int]) -> None:
    trunk = Noting()
    made(trunk, num_slots=30).forward(plan_of(*step), step[0], step[2])
    assert (len(trunk.given[0].token_ids), len(trunk.given[0].rows), len(trunk.given[0].logits_ids)) == step


def test_all_sizes_leave_their_results_in_one_place() -> None:
    """Each graph kept its own: gigabytes of logits that no memory plan knew of."""
    prompts = made(Noting())
    left = [prompts.step(size) for size in prompts.sizes if size.lines]
    for part in zip(*((batch.page_table, *out) for batch, out in left), strict=True):
        assert len({found.data_ptr() for found in part}) == 1


def test_sizes_without_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine opened with a traceback, or not at all; graphs of prompts are no need."""

    class Small(Noting):
        def run(self, batch: Batch) -> Computed:
            if len(batch.token_ids) > 128:
                raise torch.OutOfMemoryError("no")
            return super().run(batch)

    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device: None)
    prompts = made(Small())
    prompts.drop_long_ones()
    assert {size.tokens for size in prompts.sizes} == {64, 128}


def test_sizes_that_keep_a_gpu_busy_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tokens = [0.0], []

    class Slow(Noting):
        def run(self, batch: Batch) -> Computed:
            now[0] += 20.0  # the host's
            tokens.append(len(batch.token_ids))
            return super().run(batch)

    def wait(device: object) -> None:
        now[0] += 0.2 * tokens[-1] - 20.0 if tokens[-1] > 100 else 0.0  # 128 tokens: 5.6

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.torch.cuda, "synchronize", wait)
    prompts = made(Slow())
    prompts.drop_long_ones()
    assert {size.tokens for size in prompts.sizes} == {64} and set(tokens) == {64, 128}
