"""Choosing by no more than the best tokens: the tokens that logits give, wherever it may be asked for."""

import pytest
import torch
from kit.fake_session import VOCAB, resolved
from kit.guided import EOS, compiled

from hemiola.plugins.step import forms
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.head import Best, Head
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine.request import Bounds, new_request
from hemiola.runtime.engine.step import Plan, Row
from hemiola.runtime.step.choice import Argmax
from hemiola.runtime.step.eager import EagerSteps
from hemiola.runtime.step.ledger import Ledger

GREEDY = SamplingParams(temperature=0.0)
OPS = forms("compiled")
NAN, INF = float("nan"), float("inf")


def computed(logits: torch.Tensor, may_compute: bool = True) -> Computed:
    """With a head of which `logits` are asked, or must not be."""

    def compute(lines: torch.Tensor) -> torch.Tensor:
        assert may_compute, "logits are computed"
        return logits

    def best_of(lines: torch.Tensor) -> Best:
        top = torch.where(logits.isnan(), INF, logits)
        return Best(top.amax(1), top.argmax(1))

    return Computed(torch.zeros(1), torch.zeros(1), Head(compute, best_of))


def choice_of(params: SamplingParams, guided: bool = False) -> object:
    """Of a step with one row."""
    config = resolved()
    request = new_request(
        1, [3, 4, 5], params, Bounds(64, 64, VOCAB, (EOS,)), grammar=compiled("a*b") if guided else None
    )
    eager = EagerSteps.__new__(EagerSteps)
    eager._ops, eager._config, eager._ledger = OPS, config, Ledger(config, torch.device("cpu"))
    return eager._choice(Plan([Row(request, 1, 3, 0, True, 0, (0, 0))]))


@pytest.mark.parametrize("seed", range(12))
def test_a_greedy_choice_needs_no_logits(seed: int) -> None:
    """And says of each line the same token, and whether it is broken."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(5, (9, VOCAB), generator=rng).float()
    logits[torch.rand(logits.shape, generator=rng) < 0.005] = NAN
    logits[torch.rand(len(logits), generator=rng) < 0.1] = -INF
    choice = choice_of(GREEDY)
    assert isinstance(choice, Argmax)
    scores = choice.scores(computed(logits, may_compute=False))
    best, from_logits = choice.choose(scores, None), choice.choose(logits, None)
    assert torch.equal(best.logit.isfinite(), from_logits.logit.isfinite())
    sound = best.logit.isfinite()
    assert torch.equal(best.token_id[sound], from_logits.token_id[sound])


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
    logits = torch.zeros(1, VOCAB)
    assert choice_of(params, guided).scores(computed(logits)) is logits


def test_without_a_sooner_way_a_greedy_step_takes_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    assert choice_of(GREEDY).scores(Computed(logits, logits)) is logits
