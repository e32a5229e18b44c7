"""Compiled draws give the tokens of the reference, whatever their rules and lines are."""

import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import redzones

from hemiola.plugins.cpu import kernel
from hemiola.plugins.step import STEP_OPS
from hemiola.plugins.step.draw import compiled
from hemiola.plugins.step.draw.reference import ALL, NO_TOP_P

INF, NAN = float("inf"), float("nan")
DRAW = STEP_OPS["draw"]
pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs without TRITON_INTERPRET=1"),
]


class Drawn(NamedTuple):
    """The rule of a line."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_p: float = NO_TOP_P
    top_k: int = ALL
    greedy: bool = False


TINY, HUGE = 5e-324, 1e308
RULES = [
    Drawn(), Drawn(greedy=True), Drawn(TINY), Drawn(1e-3), Drawn(0.6), Drawn(100.0), Drawn(HUGE),
    *[Drawn(top_k=k) for k in (1, 2, 50, 1024, 1025, 151_935, 151_936, 2**31 - 1)],
    *[Drawn(top_p=p) for p in (5e-324, 1e-9, 0.1, 0.9, 0.999, 1 - 2.0**-53)],
    *[Drawn(min_p=p) for p in (5e-324, 1e-9, 0.2, 1.0)],
    Drawn(0.6, 0.0, 0.95, 20), Drawn(1.5, 1e-9, 0.999), Drawn(100.0, 0.5, 0.5, 3000), Drawn(HUGE, 1.0, 0.5),
    Drawn(TINY, 0.1, 0.9, 7), Drawn(2.0, 0.01, 1e-9, 1), Drawn(greedy=True, top_k=3),
]  # fmt: skip


def arguments(scores: torch.Tensor, rules: list[Drawn], seed: int = 0) -> list[torch.Tensor | bool | int]:
    """Of the op. The columns of numbers lie apart, as in a table of rules."""
    floats = torch.tensor([rule[:3] for rule in rules], dtype=torch.float64).reshape(-1, 3)
    whole = [[rule.top_k, seed * 7 + n, n] for n, rule in enumerate(rules)]
    whole = torch.tensor(whole, dtype=torch.int64).reshape(-1, 3)
    greedy = torch.tensor([rule.greedy for rule in rules], dtype=torch.bool)
    position = torch.arange(len(rules)) * 1001 + seed * 2**33
    most = max((rule.top_k for rule in rules if rule.top_k != ALL or rule.top_p != NO_TOP_P), default=0)
    columns = floats[:, :1], floats[:, 1:2], floats[:, 2:], whole[:, :1], whole[:, 1:]
    return [scores, *columns, greedy, position, any(rule.min_p for rule in rules), most]


def tokens(form: str, values: list) -> torch.Tensor:
    DRAW.check(*values)
    with redzones.given(list(values), [False] * len(values)) as given_:
        return DRAW.bind(form, ())(*given_)


def check(scores: torch.Tensor, rules: list[Drawn], seed: int = 0) -> torch.Tensor:
    """The compiled form's tokens: of lines with a best number, they are the reference's."""
    values = arguments(scores, rules, seed)
    before = scores.clone()
    mine, wanted = tokens("compiled", values), DRAW.reference(*values)
    assert torch.equal(before.view(torch.int32), scores.view(torch.int32))
    sound = scores.amax(-1).isfinite()
    differ = ((mine != wanted) & sound).nonzero().flatten().tolist()
    assert not differ, [(n, rules[n], mine[n], wanted[n]) for n in differ]
    assert ((mine >= 0) & (mine < scores.shape[1])).all()
    return mine


def lines(num: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 1023, 1024, 1025, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_every_rule_draws_the_references_token(size: int, seed: int) -> None:
    check(lines(len(RULES), size, seed), RULES, seed)


@pytest.mark.parametrize("size", [151_936, 2**17 + 1])
def test_every_rule_draws_from_a_large_vocabulary(size: int) -> None:
    """Many keys share the high bits, and more than a few tokens stay."""
    check(lines(len(RULES), size), RULES)
    narrow = 1 + lines(3, size, 1) * 1e-4
    check(narrow, [Drawn(top_p=0.5), Drawn(top_k=70_000), Drawn(0.01, 0.0, 0.9, 99_999)])


@pytest.mark.parametrize("kind", ["equal", "zeros of both signs", "few values", "steps", "one beside -inf"])
@pytest.mark.parametrize("size", [1, 2, 64, 5003])
def test_of_equal_scores_the_lowest_ids_are_kept(kind: str, size: int) -> None:
    scores = torch.zeros(len(RULES), size)
    if kind == "zeros of both signs":
        scores[:, 1::2] = -0.0
    if kind == "few values":
        scores = lines(len(RULES), size).round()
    if kind == "steps":
        scores -= torch.arange(size) // 7
    if kind == "one beside -inf":
        scores[:] = -INF
        scores[:, size // 2] = -4.0
    for seed in range(5):
        check(scores, RULES, seed)


def test_extreme_scores_keep_their_order() -> None:
    largest, smallest = torch.finfo(torch.float32).max, 1.4e-45
    extreme = torch.tensor([largest, -largest, smallest, -smallest, 0.0, -0.0, -INF, 1.0])
    scores = extreme.repeat(len(RULES), 5)
    for seed in range(5):
        check(scores, RULES, seed)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["one", "all"])
def test_a_broken_line_costs_no_other_its_token(broken: float, where: str) -> None:
    scores = lines(len(RULES), 300)
    wanted = check(scores, RULES)
    hurt = scores.clone()
    hurt[1::3, 7 if where == "one" else slice(None)] = broken
    found = check(hurt, RULES)
    untouched = torch.arange(len(RULES)) % 3 != 1
    assert torch.equal(found[untouched], wanted[untouched])


@pytest.mark.parametrize("num_lines", [0, 1, 2, 15, 16, 17, 64, 65])
def test_any_number_of_lines(num_lines: int) -> None:
    check(lines(num_lines, 333), (RULES * 3)[:num_lines])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_token_does_not_depend_on_other_lines_or_threads(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Nor on the span in which its line is weighed, nor on where its line lies in memory."""
    monkeypatch.setattr(kernel, "usual_threads", lambda: num_threads)
    scores = lines(len(RULES), 4099)
    values = arguments(scores, RULES)
    together = tokens("compiled", values)

    def part(at: slice | torch.Tensor) -> torch.Tensor:
        return tokens("compiled", [v[at] if isinstance(v, torch.Tensor) else v for v in values])

    assert together.tolist() == [int(part(slice(n, n + 1))) for n in range(len(RULES))]
    assert torch.equal(part(torch.arange(len(RULES)).flip(0)).flip(0), together)
    monkeypatch.setattr(compiled, "AT_ONCE", 3 * 4099)
    assert torch.equal(part(slice(None)), together)
    wide = torch.full((len(RULES), 5000), NAN)
    wide[:, 3:4102] = scores
    assert torch.equal(tokens("compiled", [wide[:, 3:4102], *values[1:]]), together)


SOME = st.one_of(
    st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, 3.4028235e38, -3.4028235e38, 1e-45]),
    st.floats(-20, 20, width=32),
    st.integers(-3, 3).map(float),
)
DRAWS = st.builds(
    Drawn,
    st.one_of(st.floats(0.01, 10), st.sampled_from([TINY, HUGE])),
    st.one_of(st.just(0.0), st.floats(0, 1)),
    st.one_of(st.just(NO_TOP_P), st.floats(0, 1, exclude_min=True, exclude_max=True)),
    st.one_of(st.just(ALL), st.integers(1, 40), st.integers(1, 2**31 - 1)),
    st.booleans(),
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(SOME, min_size=1, max_size=40), st.lists(DRAWS, min_size=1, max_size=6), st.integers(0, 2**20)
)
@example([0.0, -0.0], [Drawn(top_p=0.5)], 0)
@example([-INF] * 3, [Drawn(top_p=0.5, top_k=2)], 0)
def test_any_line_and_any_rules(line: list[float], rules: list[Drawn], seed: int) -> None:
    turned = [line[n % len(line) :] + line[: n % len(line)] for n in range(len(rules))]
    check(torch.tensor(turned), rules, seed)
