"""Choosing by no more than the best tokens: the tokens that logits give, wherever it may be asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.fake_session import VOCAB, resolved
from kit.guided import EOS, compiled

import hemiola.runtime.step.choice as choice_module
from hemiola.plugins.step import forms
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose import rules as rules_module
from hemiola.runtime.choose.rules import RecentGroups
from hemiola.runtime.choose.sampling import logprobs
from hemiola.runtime.device.head import Best, Head
from hemiola.runtime.device.session import Computed
from hemiola.runtime.schedule.plan import Plan, Row
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.step.choice import Argmax, ByRules
from hemiola.runtime.step.eager import EagerSteps
from hemiola.runtime.step.ledger import Ledger
from hemiola.runtime.step.pack import pack
from hemiola.runtime.step.program import Batch

GREEDY = SamplingParams(temperature=0.0)
OPS = forms("compiled")
CPU = torch.device("cpu")
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


def steps() -> EagerSteps:
    """What chooses, and nothing else."""
    eager, config = EagerSteps.__new__(EagerSteps), resolved()
    eager._ops, eager._config, eager._ledger = OPS, config, Ledger(config, CPU)
    eager._groups = RecentGroups(CPU)
    return eager


def row_of(params: SamplingParams, slot: int = 1, guided: bool = False) -> Row:
    bounds, grammar = Bounds(64, 64, VOCAB, (EOS,)), compiled("a*b") if guided else None
    return Row(new_request(1, [3, 4, 5], params, bounds, grammar=grammar), slot, 3, 0, True, 0, (0, 0))


def choice_of(params: SamplingParams, guided: bool = False) -> object:
    """Of a step with one row."""
    return choice_for(steps(), [row_of(params, guided=guided)])


def choice_for(eager: EagerSteps, rows: list[Row]) -> Any:
    """Of a step with these rows."""
    return eager._choice(Plan(rows), pack(rows, has_head=False).masks)


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


def batch_of(num_lines: int) -> Batch:
    """Its lines stand at position 3 of slots 1, 2, ..."""
    none = torch.empty(0)
    return Batch(
        none, none, none, none, none, torch.arange(num_lines) + 1, torch.full((num_lines,), 3)
    )  # fmt: skip


def test_rows_that_ask_for_logprobs_do_not_pay_for_each_other_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that follow each other are one call, and everybody gets what he asked for, bit for bit."""
    asked = [0, 3, None, 20, 1, 5, None]
    rows = [row_of(SamplingParams(logprobs=num), slot) for slot, num in enumerate(asked, 1)]
    choice, calls = choice_for(steps(), rows), []
    assert isinstance(choice, ByRules)

    def counted(scores: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        calls.append(len(scores))
        return logprobs(scores, *given)

    monkeypatch.setattr(choice_module, "logprobs", counted)
    scores = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
    best = choice.choose(scores, batch_of(len(rows)))
    assert calls == [2, 3] and choice.logprobs.keys() == {0, 1, 3, 4, 5}
    for row, found in choice.logprobs.items():
        num_top = asked[row]
        assert num_top is not None
        alone = logprobs(scores[row : row + 1], best.token_id[row : row + 1], num_top)
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, alone, strict=True))
        assert found[1].shape == (1, num_top)


def test_a_step_does_not_put_the_rules_of_the_step_before_together_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager, made = steps(), []
    groups_of = rules_module.groups_of

    def counted(rules: list, device: torch.device) -> list:
        made.append(rules)
        return groups_of(rules, device)

    monkeypatch.setattr(rules_module, "groups_of", counted)
    rows = [row_of(SamplingParams(temperature=1.0, seed=n, logit_bias={n: 3.0}), n + 1) for n in range(4)]
    scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))

    def tokens(rows: list[Row]) -> list[int]:
        choice = choice_for(eager, rows)
        assert isinstance(choice, ByRules)
        return choice.choose(scores[: len(rows)], batch_of(len(rows))).token_id.tolist()

    once = tokens(rows)
    assert [tokens(rows) for _ in range(5)] == [once] * 5 and len(made) == 1
    assert tokens(rows[:2]) == once[:2] and tokens(rows) == once and len(made) == 2
    assert tokens(rows[1:]) == [*map(steps_alone(scores), rows[1:], range(3))]
    for number in range(9):
        tokens(rows[number % 4 :][:1])
    assert len(eager._groups._kept) <= RecentGroups.NUM_KEPT


def steps_alone(scores: torch.Tensor) -> Callable[[Row, int], int]:
    """The token of a row by itself, whose line is this one."""

    def token(row: Row, line: int) -> int:
        choice = choice_for(steps(), [row])
        assert isinstance(choice, ByRules)
        batch = batch_of(4)
        one = batch._replace(
            line_slot=batch.line_slot[line : line + 1], line_position=batch.line_position[:1]
        )
        return int(choice.choose(scores[line : line + 1], one).token_id)

    return token
