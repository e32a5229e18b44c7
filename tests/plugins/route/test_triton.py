"""Choosing experts on CUDA."""

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.route.cuda import route
from tests.gpu.laws import DEVICE, HALF, MANY, error, on_gpu, poisoned, randn, rows_are_alone

pytestmark = on_gpu


def truth(scores, bias, scoring, top_k, num_groups, top_groups, renormalise, scale):
    """Weights and ids, one token at a time, ties to the lowest id."""
    scores = scores.double().cpu()
    shares = scores.softmax(1) if scoring == "softmax" else scores.sigmoid()
    choice = shares + (bias.double().cpu() if bias.numel() else 0)
    weights, ids = [], []
    for share, line in zip(shares, choice.tolist(), strict=True):
        size = len(line) // num_groups
        groups = [sorted(line[g * size : (g + 1) * size])[-2:] for g in range(num_groups)]
        best = sorted(range(num_groups), key=lambda g: (-sum(groups[g]), g))[:top_groups]
        open_ = [e for e in range(len(line)) if e // size in best or top_groups == num_groups]
        ids.append(sorted(open_, key=lambda e: (-line[e], e))[:top_k])
        weights.append(share[ids[-1]])
    made = torch.stack(weights)
    made = made / made.sum(1, keepdim=True) if renormalise else made
    return made * scale, torch.tensor(ids, dtype=torch.int32)


CASES = {
    "qwen": (256, "softmax", 8, 1, 1, True, 1.0, False),
    "nemotron": (128, "sigmoid", 6, 1, 1, True, 2.5, True),
    "super": (512, "sigmoid", 22, 8, 4, True, 5.0, True),
    "odd": (30, "sigmoid", 3, 5, 2, False, 1.5, True),
    "all": (7, "softmax", 7, 1, 1, False, 1.0, False),
    "one": (5, "softmax", 1, 1, 1, True, 1.0, True),
}


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name: str) -> None:
    num_experts, *rest, biased = CASES[name]
    scores = randn(20, num_experts + 1, dtype=torch.float32)[:, :num_experts]  # beside a shared expert's gate
    bias = randn(num_experts, dtype=torch.float32) if biased else torch.empty(0, device=DEVICE)
    with poisoned():
        weights, ids = route(scores, bias, *rest)
    wanted_weights, wanted_ids = truth(scores, bias, *rest)
    assert torch.equal(ids.cpu(), wanted_ids) and ids.dtype is torch.int32
    assert weights.dtype is torch.float32 and error(weights, wanted_weights) < 1e-6


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lowest_id(scoring: str) -> None:
    scores = torch.zeros(1, 64, dtype=HALF, device=DEVICE)
    scores[0, 40:] = 1
    _, ids = route(scores, scores.new_empty(0), scoring, 4, 1, 1, True, 1.0)
    assert ids.tolist() == [[40, 41, 42, 43]]
    _, ids = route(torch.zeros_like(scores), scores.new_empty(0), scoring, 3, 4, 2, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_alone(name: str) -> None:
    num_experts, *rest, biased = CASES[name]
    bias = randn(num_experts, dtype=torch.float32) if biased else torch.empty(0, device=DEVICE)
    scores = randn(MANY, num_experts + 1)[:, :num_experts]
    rows_are_alone(lambda s: route(s, bias, *rest)[0], scores)
    rows_are_alone(lambda s: route(s, bias, *rest)[1], scores)


def test_what_is_not_a_number_is_chosen_last_and_shows() -> None:
    scores = torch.randn(1, 8, device=DEVICE)
    scores[0, 2] = float("nan")
    weights, ids = route(scores, scores.new_empty(0), "sigmoid", 8, 1, 1, False, 1.0)
    assert sorted(ids[0].tolist()) == list(range(8)) and ids[0, 7] == 2 and weights[0, 7].isnan()


def test_refusals() -> None:
    none = torch.empty(0, device=DEVICE)
    with pytest.raises(ValueError, match="3 of the experts in 1 of 4 groups"):
        route(randn(1, 8), none, "sigmoid", 3, 4, 1, True, 1.0)
    with pytest.raises(ValueError, match="scoring is 'max'"):
        route(randn(1, 8), none, "max", 3, 1, 1, True, 1.0)
