"""Choosing by no more than the best tokens: the verdict that logits give, wherever it may be asked for."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.head import Best, Head
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine.feed import Feed
from hemiola.runtime.engine.judge import judge, scores_of
from hemiola.runtime.engine.step import Batch
from tests.runtime.engine.test_compiled import CHUNK, INF, NAN, SLOTS, VOCAB, columns, ledger, plan, same

GREEDY = SamplingParams(temperature=0.0)


def batch_of(rng: torch.Generator, params: SamplingParams, guided: bool = False) -> tuple[Batch, Any]:
    known = ledger(rng)
    made = plan(rng, known, params)
    for row in made.rows:
        row.request.guide = row.request.guide if guided else None
    pages = SimpleNamespace(table=np.zeros((SLOTS, 3), np.int32))
    feed: Any = Feed(pages, known)  # type: ignore[arg-type]
    return feed.fill_anywhere(made), known


def computed(logits: torch.Tensor, may_compute: bool = True) -> Computed:
    """With a head of which `logits` are asked, or must not be."""

    def compute(lines: torch.Tensor) -> torch.Tensor:
        assert may_compute, "logits are computed"
        return logits

    return Computed(torch.zeros(1), torch.zeros(1), Head(compute, lambda lines: best_of(logits)))


def best_of(logits: torch.Tensor) -> Best:
    top = torch.where(logits.isnan(), INF, logits)
    return Best(top.amax(1), top.argmax(1))


@pytest.mark.parametrize("seed", range(12))
def test_a_greedy_verdict_needs_no_logits(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    batch, mine = batch_of(rng, GREEDY)
    other = copy.copy(mine)
    other.__dict__ |= {n: getattr(value, "clone", lambda v=value: v)() for n, value in vars(mine).items()}
    logits = torch.randint(5, (len(batch.logits_ids), VOCAB), generator=rng).float()
    logits[torch.rand(logits.shape, generator=rng) < 0.005] = NAN
    logits[torch.rand(len(logits), generator=rng) < 0.1] = -INF

    scores = scores_of(batch, computed(logits, may_compute=False))
    assert isinstance(scores, Best)
    assert same(judge(batch, scores, mine, CHUNK), judge(batch, logits, other, CHUNK))
    for a, b in zip(columns(mine), columns(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("params", "guided"),
    [
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0.0, logprobs=1), False),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3), False),
        (GREEDY, True),
    ],
    ids=["drawn", "logprobs", "penalties", "grammar"],
)
def test_who_asks_for_more_gets_logits(params: SamplingParams, guided: bool) -> None:
    seed = 0
    batch, _ = batch_of(torch.Generator().manual_seed(seed), params, guided)
    while not len(batch.logits_ids) or (guided and batch.masks is None):
        seed += 1
        batch, _ = batch_of(torch.Generator().manual_seed(seed), params, guided)
    logits = torch.zeros(2, VOCAB)
    assert scores_of(batch, computed(logits)) is logits


def test_without_a_sooner_way_a_greedy_step_takes_logits() -> None:
    batch, _ = batch_of(torch.Generator().manual_seed(0), GREEDY)
    logits = torch.zeros(2, VOCAB)
    assert scores_of(batch, Computed(logits, logits)) is logits
