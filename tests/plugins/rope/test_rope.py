"""Rotary positions against transformers' own words for them."""

from collections.abc import Callable

import pytest
import torch
from kit.ops import both_forms, form, int32, same_bits
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding, apply_rotary_pos_emb

from hemiola.plugins import OPS

Rope = Callable[..., torch.Tensor]


rope = both_forms("rope")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head_dim,share", [(64, 0.25), (64, 1.0), (80, 0.5), (16, 0.5), (6, 1.0)])
def test_transformers_says_the_same(rope: Rope, head_dim: int, share: float) -> None:
    """The whole head, a part of it, and numbers of pairs that fill no vector."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    embedding = Qwen3NextRotaryEmbedding(Qwen3NextConfig(head_dim=head_dim, rope_parameters=parameters))
    cos, sin = embedding(torch.empty(0), torch.arange(500)[None])
    table = torch.stack([x[0, :, : x.shape[2] // 2] for x in (cos, sin)], dim=1)
    positions = int32(0, 1, 499, 7, 7, 250)
    q, k = numbers(6, 4, head_dim), numbers(6, 2, head_dim)
    words = apply_rotary_pos_emb(q[None], k[None], cos[:, positions], sin[:, positions], unsqueeze_dim=2)
    for x, expected in zip((q, k), words, strict=True):
        y = rope(x, positions, table)
        torch.testing.assert_close(y, expected[0], rtol=1e-6, atol=1e-6)
        assert same_bits(y[..., int(head_dim * share) :], x[..., int(head_dim * share) :])
        assert same_bits(y[0], x[0]), "place 0 does not turn"


@pytest.mark.parametrize("pairs", [1, 15, 16, 17, 40])
def test_a_single_lane_rounds_like_a_vector(pairs: int) -> None:
    """Where pairs fill no vector, the rest turns one by one; no product may be fused with the sum."""
    rope, table, x = form(OPS["rope"], "compiled"), numbers(30, 2, pairs), numbers(30, 3, 2, pairs)
    positions = torch.arange(30).int()
    y = rope(x.flatten(2), positions, table).unflatten(2, (2, pairs))
    first, second, (cos, sin) = x[:, :, 0], x[:, :, 1], table[:, :, None].unbind(1)
    assert same_bits(y[:, :, 0], first * cos - second * sin)
    assert same_bits(y[:, :, 1], second * cos + first * sin)


@pytest.mark.parametrize("position", [-1, 30, 10**6])
def test_a_place_that_is_not_in_the_table_is_refused(position: int) -> None:
    rope = form(OPS["rope"], "compiled")
    with pytest.raises(IndexError, match="the table ends before 30"):
        rope(numbers(3, 1, 4), int32(0, position, 1), numbers(30, 2, 2))
