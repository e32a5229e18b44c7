"""Prompts in fixed sizes: which there are, what is fed to them, and what of their results is whose."""

from types import SimpleNamespace

import pytest
import torch
from kit.fake_session import resolved

from hemiola.runtime.device.session import Computed
from hemiola.runtime.step import prompts as module
from hemiola.runtime.step.prompts import Inputs, Prompts, Size, sizes_of

CPU = torch.device("cpu")
SIZES = {"max_len": 4096, "max_rows": 20, "max_step_tokens": 300, "num_drafts": 3}


class Noting:
    """A trunk that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Inputs] = []

    def run(self, batch: object) -> Computed:
        given = Inputs(*(getattr(batch, name).clone() for name in Inputs._fields))
        self.given.append(given)
        return Computed(given.logits_ids[:, None] * 1.0, given.token_ids[:, None] * 1.0)


def batch_of(num_tokens: int, num_rows: int, num_lines: int, width: int) -> SimpleNamespace:
    """Nothing in it is 0."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(1, 99, shape, dtype=torch.int32)

    return SimpleNamespace(
        token_ids=numbers(num_tokens), positions=numbers(num_tokens), rows=numbers(num_rows, 8),
        page_table=numbers(num_rows, width), logits_ids=numbers(num_lines),
    )  # fmt: skip


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
    """What an earlier, larger step left behind it is nobody's: a stale id of a logit lies outside."""
    trunk, config = Noting(), resolved(**SIZES)
    prompts = Prompts(config, trunk, CPU)
    width = prompts._there.page_table.shape[1]
    prompts.run(batch_of(300, 20, 80, width))
    batch = batch_of(*step, width)
    out = prompts.run(batch)
    given = trunk.given[-1]
    assert (len(given.token_ids), len(given.rows), len(given.logits_ids)) == size
    for name, there in zip(Inputs._fields, given, strict=True):
        mine = getattr(batch, name)
        assert torch.equal(there[: len(mine)], mine) and not there[len(mine) :].any()
    assert torch.equal(out.logits[:, 0], batch.logits_ids * 1.0)
    assert torch.equal(out.hidden[:, 0], batch.token_ids * 1.0)


@pytest.mark.parametrize("step", [(301, 1, 1), (64, 21, 1), (300, 20, 81)], ids=str)
def test_a_step_that_fits_no_size_runs_as_it_is(step: tuple[int, int, int]) -> None:
    trunk = Noting()
    prompts = Prompts(resolved(**SIZES), trunk, CPU)
    batch = batch_of(*step, prompts._there.page_table.shape[1])
    prompts.run(batch)
    assert torch.equal(trunk.given[0].token_ids, batch.token_ids)


def test_all_sizes_leave_their_results_in_one_place() -> None:
    """Each graph kept its own: gigabytes of logits that no memory plan knew of."""
    prompts = Prompts(resolved(**SIZES), Noting(), CPU)
    left = [prompts.step(size) for size in prompts.sizes if size.lines]
    for part in zip(*left, strict=True):
        assert len({found.data_ptr() for found in part}) == 1


def test_sizes_without_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine opened with a traceback, or not at all; graphs of prompts are no need."""

    class Small(Noting):
        def run(self, batch: object) -> Computed:
            if len(batch.token_ids) > 128:
                raise torch.OutOfMemoryError("no")
            return super().run(batch)

    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device: None)
    prompts = Prompts(resolved(**SIZES), Small(), CPU)
    prompts.drop_long_ones()
    assert {size.tokens for size in prompts.sizes} == {64, 128}


def test_sizes_that_keep_a_gpu_busy_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tokens = [0.0], []

    class Slow(Noting):
        def run(self, batch: object) -> Computed:
            now[0] += 20.0  # the host's
            tokens.append(len(batch.token_ids))
            return super().run(batch)

    def wait(device: object) -> None:
        now[0] += 0.2 * tokens[-1] - 20.0 if tokens[-1] > 100 else 0.0  # 128 tokens: 5.6

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.torch.cuda, "synchronize", wait)
    prompts = Prompts(resolved(**SIZES), Slow(), CPU)
    prompts.drop_long_ones()
    assert {size.tokens for size in prompts.sizes} == {64} and set(tokens) == {64, 128}
