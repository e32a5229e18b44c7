"""Compiled logprobs are the reference's, bit for bit, whatever a line holds."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import redzones
from kit.ops import same_bits

from hemiola.plugins.cpu import kernel
from hemiola.plugins.step import STEP_OPS
from hemiola.plugins.step.logprobs import compiled

INF, NAN = float("inf"), float("nan")
LOGPROBS = STEP_OPS["logprobs"]
Tensors = tuple[torch.Tensor, ...]
pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs without TRITON_INTERPRET=1"),
]


def found(form: str, scores: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Tensors:
    LOGPROBS.check(scores, token_ids, num_top)
    with redzones.given([scores, token_ids, num_top], [False] * 3) as values:
        return LOGPROBS.bind(form, ())(*values)


def check(scores: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Tensors:
    mine, wanted = (
        found("compiled", scores, token_ids, num_top),
        found("reference", scores, token_ids, num_top),
    )
    sound = scores.amax(-1).isfinite()
    for ours, theirs in zip(mine, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
        assert same_bits(ours[sound], theirs[sound])
    assert ((mine[1] >= 0) & (mine[1] < scores.shape[1])).all()
    assert not mine[0][~sound].isfinite().any(), "a broken line has no logprobs"
    return mine


def lines(num: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 31, 1025, 4096, 151_936, 2**17 + 1])
@pytest.mark.parametrize("num_top", [0, 1, 20, 64])
def test_every_vocabulary_and_number(size: int, num_top: int) -> None:
    check(lines(3, size), torch.tensor([0, size // 2, size - 1]), num_top)


@pytest.mark.parametrize("num_lines", [0, 1, 16, 65])
def test_any_number_of_lines(num_lines: int) -> None:
    check(lines(num_lines, 333), torch.arange(num_lines), 5)


@pytest.mark.parametrize(
    "kind", ["equal", "zeros of both signs", "rising", "falling", "with -inf", "extreme"]
)
def test_of_equals_the_lowest_ids_are_the_best(kind: str) -> None:
    size = 50
    scores = {
        "equal": torch.ones(size),
        "zeros of both signs": torch.tensor([0.0, -0.0, -1.0, 0.0, -0.0] * 10),
        "rising": torch.arange(size) // 3 + 0.5,
        "falling": -(torch.arange(size) // 3) - 0.5,
        "with -inf": torch.where(torch.arange(size) % 4 == 1, lines(1, size)[0], -INF),
        "extreme": torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 7.0] * 10),
    }[kind]
    for num_top in (1, 7, 49, 50, 51):
        check(scores.repeat(2, 1), torch.tensor([1, 3]), num_top)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["one", "all"])
def test_a_broken_line_costs_no_other_its_logprobs(broken: float, where: str) -> None:
    scores, token_ids = lines(9, 300), torch.arange(9)
    wanted = check(scores, token_ids, 5)
    hurt = scores.clone()
    if where == "one" and broken == -INF:
        hurt[1::3, 1:] = -INF
        hurt[1::3, 0] = NAN
    hurt[1::3, 7 if where == "one" else slice(None)] = broken
    after = check(hurt, token_ids, 5)
    untouched = torch.arange(9) % 3 != 1
    for ours, theirs in zip(after, wanted, strict=True):
        assert same_bits(ours[untouched], theirs[untouched])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_logprobs_do_not_depend_on_other_lines_or_threads(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(kernel, "usual_threads", lambda: num_threads)
    scores, token_ids = lines(20, 4099), torch.arange(20) * 7
    together = check(scores, token_ids, 20)
    for n in range(20):
        alone = found("compiled", scores[n : n + 1], token_ids[n : n + 1], 20)
        assert all(same_bits(one, all_of[n : n + 1]) for one, all_of in zip(alone, together, strict=True))
    monkeypatch.setattr(compiled, "AT_ONCE", 3 * 4099)
    again = found("compiled", scores, token_ids, 20)
    assert all(map(same_bits, again, together))


NUMBERS = st.one_of(
    st.sampled_from([-INF, -1.0, 0.0, 1.0, 3.4028235e38, -3.4028235e38]),
    st.floats(-20, 20, width=32),
    st.integers(-3, 3).map(float),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(NUMBERS, min_size=1, max_size=40), st.integers(0, 45), st.integers(0, 39))
def test_any_line(line: list[float], num_top: int, token_id: int) -> None:
    check(torch.tensor([line, line[::-1]]), torch.tensor([token_id % len(line), 0]), num_top)
