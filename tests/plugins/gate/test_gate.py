"""Gates against torch's and transformers' own words for them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kit.ops import both_forms
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextMLP

from hemiola.plugins import references

Gate = Callable[..., torch.Tensor]
X, OPENING = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)) * 3


gate = both_forms("gate")


def test_silu_is_the_middle_of_swiglu(gate: Gate) -> None:
    mlp = Qwen3NextMLP(Qwen3NextConfig(hidden_size=48, intermediate_size=32))
    with torch.no_grad():
        hidden = gate(mlp.up_proj(X), mlp.gate_proj(X), "silu")
        torch.testing.assert_close(mlp.down_proj(hidden), mlp(X))
    torch.testing.assert_close(gate(X, OPENING, "silu"), F.silu(OPENING) * X)


def test_sigmoid_is_the_gate_of_attention_and_of_a_shared_expert(gate: Gate) -> None:
    torch.testing.assert_close(gate(X, OPENING, "sigmoid"), X * torch.sigmoid(OPENING))
    torch.testing.assert_close(gate(X, OPENING[:, :1], "sigmoid"), torch.sigmoid(OPENING[:, :1]) * X)


@pytest.mark.parametrize("columns", [1, 48])
def test_gates_without_bound_open_or_shut(gate: Gate, columns: int) -> None:
    for size in (100.0, 1e30):
        opening = torch.full((9, columns), size)
        assert torch.equal(gate(X, opening, "sigmoid"), X)
        assert (gate(X, -opening, "sigmoid") == 0).all() and (gate(X, -opening, "silu") == 0).all()
        assert torch.equal(gate(X, opening, "silu"), X * size)


def test_nan_stays_where_it_was(gate: Gate) -> None:
    x, opening = X.clone(), OPENING.clone()
    x[2, 3] = opening[4, 5] = torch.nan
    for kind in ("silu", "sigmoid"):
        assert gate(x, opening, kind).isnan().nonzero().tolist() == [[2, 3], [4, 5]]


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'gelu'"):
        references.gate(X, OPENING, "gelu")
