"""Routers against transformers' own words for them, and what they do where scores decide nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.ops import both_forms, rel_error
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

NONE = torch.empty(0)
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


route = both_forms("route")


def scores(num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)) * 2


def check(ours: tuple, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """The same experts with the same weights, in any order."""
    mine, theirs = ours[1].argsort(1), ids.argsort(1)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == torch.int32
    assert torch.equal(ours[1].gather(1, mine), ids.gather(1, theirs).int())
    assert rel_error(ours[0].gather(1, mine), weights.gather(1, theirs)) < 1e-6


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("num_experts,top_k", [(64, 10), (37, 3), (5, 5), (1, 1), (512, 10)])
def test_equals_qwen3_nexts_router(route: Route, num_experts: int, top_k: int, renormalise: bool) -> None:
    raw = scores(20, num_experts)
    sizes: Any = {"num_experts": num_experts, "num_experts_per_tok": top_k, "hidden_size": num_experts}
    router = Qwen3NextTopKRouter(Qwen3NextConfig(**sizes, norm_topk_prob=renormalise))
    router.weight.data = torch.eye(num_experts)
    with torch.no_grad():
        _, weights, ids = router(raw)
    ours = route(raw, NONE, "softmax", top_k, 1, 1, renormalise, 1.0)
    assert torch.equal(ours[1], ids.int()), "best first"
    check(ours, weights, ids)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 2), (4, 4), (10, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_nemotron_hs_router(
    route: Route, groups: tuple[int, int], biased: bool, renormalise: bool
) -> None:
    """The bias and the groups decide who is chosen, never the weight."""
    raw = scores(30, 60)
    sizes: Any = {"n_routed_experts": 60, "num_experts_per_tok": 5, "hidden_size": 60}
    config = NemotronHConfig(
        **sizes,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    router = NemotronHTopkRouter(config)
    router.weight.data = torch.eye(60)
    bias = scores(31, 60)[30] if biased else NONE
    if biased:
        router.e_score_correction_bias.data = bias
    with torch.no_grad():
        _, weights, ids = router(raw)
    check(route(raw, bias, "sigmoid", 5, *groups, renormalise, 2.5), weights, ids)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [16, 60])
def test_the_lower_id_wins_a_tie(route: Route, scoring: str, num_experts: int) -> None:
    raw = torch.zeros(3, num_experts)
    raw[1, 5:9], raw[2, num_experts - 2 :] = 1.0, 1.0
    _, ids = route(raw, NONE, scoring, 6, 1, 1, True, 1.0)
    last = num_experts - 2
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 0, 1], [last, last + 1, 0, 1, 2, 3]]


def test_the_lower_group_wins_a_tie(route: Route) -> None:
    raw = torch.zeros(2, 12)  # four groups of three, of which two stay
    raw[1, [4, 5, 7, 8, 10, 11]] = 1.0
    _, ids = route(raw, NONE, "sigmoid", 5, 4, 2, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [4, 5, 7, 8, 3]]


def test_a_group_counts_by_its_two_best(route: Route) -> None:
    """One excellent expert loses to two good ones, and takes no part at all."""
    raw = torch.full((1, 9), -20.0)
    raw[0, 0], raw[0, [4, 5]], raw[0, [6, 7]] = 5.0, 1.0, 1.5
    _, ids = route(raw, NONE, "sigmoid", 4, 3, 2, True, 1.0)
    assert ids.tolist() == [[6, 7, 4, 5]]


@pytest.mark.parametrize("scoring,groups", [("softmax", (1, 1)), ("sigmoid", (1, 1)), ("sigmoid", (5, 2))])
def test_nan_is_seen_and_names_experts_that_are_there(
    route: Route, scoring: str, groups: tuple[int, int]
) -> None:
    """Whole tokens of NaN, one NaN among scores, and infinities."""
    raw = scores(6, 20)
    raw[0], raw[1, 0], raw[2, 13], raw[3], raw[4] = torch.nan, torch.nan, torch.nan, torch.inf, -torch.inf
    weights, ids = route(raw, NONE, scoring, 8, *groups, True, 1.0)
    assert ids.min() >= 0 and ids.max() < 20
    assert all(len(set(chosen)) == 8 for chosen in ids.tolist())
    assert weights[0].isnan().all() and weights[5].isfinite().all()


@pytest.mark.parametrize("size", [88.0, 1e30])
def test_scores_without_bound_do_not_overflow(route: Route, size: float) -> None:
    raw = scores(4, 20).sign() * size
    for scoring in ("softmax", "sigmoid"):
        weights, _ = route(raw, NONE, scoring, 3, 1, 1, True, 1.0)
        torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))
