"""Filters against their definitions; draws against their distributions; nothing depends on the batch."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hemiola.runtime.accept import judge
from hemiola.runtime.request import SamplingParams
from hemiola.runtime.sampling import Draw, distribution, logprob, sample, uniform


def logits(size: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **values})


def softmax(values: np.ndarray) -> np.ndarray:
    exp = np.exp(values.astype(np.float64) - values.max())
    return exp / exp.sum()


def test_temperature() -> None:
    np.testing.assert_allclose(
        distribution(logits(), params(temperature=0.7)), softmax(logits().astype(np.float64) / 0.7)
    )


def test_a_tiny_temperature_is_greedy() -> None:
    probs = distribution(logits(), params(temperature=1e-300))
    assert probs[logits().argmax()] == 1 and probs.sum() == 1


@pytest.mark.parametrize("k", [1, 3, 11, 12, 99])
def test_top_k(k: int) -> None:
    probs = distribution(logits(), params(top_k=k))
    kept = set(np.argsort(-logits(), kind="stable")[:k].tolist())
    assert set(np.flatnonzero(probs).tolist()) == kept
    assert probs.sum() == pytest.approx(1)


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert np.flatnonzero(distribution(np.zeros(5, np.float32), params(top_k=2))).tolist() == [0, 1]


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.6, 0.9, 0.999])
def test_top_p_is_the_smallest_set_with_that_much_mass(p: float) -> None:
    base, probs = softmax(logits()), distribution(logits(), params(top_p=p))
    kept = np.flatnonzero(probs)
    assert base[kept].sum() >= p > base[kept].sum() - base[kept].min()
    assert base[kept].min() > np.delete(base, kept).max(initial=0)


def test_min_p_is_relative_to_the_best() -> None:
    base, probs = softmax(logits()), distribution(logits(), params(min_p=0.2))
    assert np.flatnonzero(probs).tolist() == np.flatnonzero(base >= 0.2 * base.max()).tolist()


def test_top_p_sees_what_top_k_left() -> None:
    values = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    probs = distribution(values, params(top_k=2, top_p=0.55))  # 0.4 / 0.7 = 0.57 is enough
    assert np.flatnonzero(probs).tolist() == [0]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(options: dict) -> None:
    """Over positions of one seed and over seeds at one position."""
    wanted, num = distribution(logits(), params(**options)), 4000
    for draws in (
        [Draw(params(**options), 7, position) for position in range(num)],
        [Draw(params(**options), seed, 31) for seed in range(num)],
    ):
        counts = np.bincount([sample(logits(), draw) for draw in draws], minlength=12)
        assert counts[wanted == 0].sum() == 0
        assert chisquare(counts[wanted > 0], wanted[wanted > 0] * num).pvalue > 1e-3


def test_the_largest_uniform_number_still_draws_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hemiola.runtime.sampling.uniform", lambda seed, position: 1 - 2.0**-53)
    for seed in range(200):
        values = logits(seed=seed)
        token_id = sample(values, Draw(params(top_k=3), 0, 0))
        assert distribution(values, params(top_k=3))[token_id] > 0


def test_the_smallest_uniform_number_draws_no_token_that_was_filtered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hemiola.runtime.sampling.uniform", lambda seed, position: 0.0)
    assert sample(np.array([0.0, 1.0, 3.0, 2.0], np.float32), Draw(params(top_k=2), 0, 0)) == 2


def test_uniform_is_philox_with_key_seed_and_counter_position() -> None:
    assert uniform(2**64 - 1, 5) == uniform(2**64 - 1, 5)
    many = np.array([uniform(3, position) for position in range(2000)])
    assert len(set(many)) == 2000 and many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.03
    assert uniform(0, 1) != uniform(1, 0)


def test_greedy_takes_the_lowest_id_of_an_exact_tie() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    assert judge([Draw(SamplingParams(), 0, 0)] * 2, scores).token_ids == [[1], [0]]


def test_rows_under_way_get_nothing() -> None:
    draw = Draw(SamplingParams(), 0, 9)
    verdict = judge([None, draw, None, draw], torch.eye(4)[[2, 3]])
    assert verdict.token_ids == [[], [2], [], [3]] and not verdict.logprobs and not verdict.errors
    assert judge([None], torch.empty(0, 4)).token_ids == [[]]


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    draws = [Draw(params(top_p=0.9), 5, 100 + at) for at in range(20)]
    together = [ids[0] for ids in judge(draws, rows).token_ids]
    alone = [judge([draw], rows[at : at + 1]).token_ids[0][0] for at, draw in enumerate(draws)]
    mixed = [draw if at % 2 else Draw(SamplingParams(), 0, 0) for at, draw in enumerate(draws)]
    assert together == alone == [sample(row.numpy(), draw) for row, draw in zip(rows, draws, strict=True)]
    assert together != rows.argmax(-1).tolist()
    assert [ids[0] for ids in judge(mixed, rows).token_ids][1::2] == together[1::2]


def test_logprobs_are_the_raw_log_softmax_whatever_the_filters() -> None:
    asked = params(temperature=0.3, top_k=2, logprobs=3, seed=1)
    verdict = judge([Draw(asked, 1, 4)], torch.from_numpy(logits())[None])
    (found,) = verdict.logprobs[0]
    wanted = torch.log_softmax(torch.from_numpy(logits()).double(), -1)
    assert [found.token_id] == verdict.token_ids[0]
    assert found.logprob == pytest.approx(float(wanted[found.token_id]))
    assert [i for i, _ in found.top] == wanted.topk(3).indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(wanted.topk(3).values.tolist())
    assert logprob(logits(), 3, 0).top == ()


def test_a_row_of_nan_fails_alone() -> None:
    rows = torch.eye(3)
    rows[1, 2] = torch.nan
    verdict = judge([Draw(SamplingParams(), 0, 5), Draw(params(), 0, 6), Draw(SamplingParams(), 0, 7)], rows)
    assert verdict.token_ids == [[0], [], [2]]
    assert verdict.errors == {1: "the engine computed NaN for the token at position 6"}
