"""The mixture of experts' reference against transformers; test_compiled.py has the compiled form."""

import pytest
import torch
from kit.ops import subject
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from hemiola.plugins import references


def test_equals_nemotron_hs_experts() -> None:
    """In eager mode; fp32 sums in other orders."""
    x, ids, weights, up, down, activation = subject("moe", "relu2", F=24, K=2, E=6, J=40, I=40).arguments(40)
    config = NemotronHConfig(
        hidden_size=24, moe_intermediate_size=40, n_routed_experts=6, mlp_hidden_act="relu2"
    )
    check(NemotronHExperts, config, {"up_proj": up, "down_proj": down}, x, ids, weights, activation)


def test_equals_qwen3_nexts_experts() -> None:
    x, ids, weights, up, down, activation = subject("moe", "swiglu", F=24, K=3, E=6, J=80, I=40).arguments(40)
    config = Qwen3NextConfig(hidden_size=24, moe_intermediate_size=40, num_experts=6)
    check(Qwen3NextExperts, config, {"gate_up_proj": up, "down_proj": down}, x, ids, weights, activation)


def check(kind, config, weights_of, x, ids, weights, activation) -> None:
    config._experts_implementation = "eager"
    experts = kind(config)
    experts.load_state_dict(weights_of)
    with torch.no_grad():
        expected = experts(x, ids.long(), weights)
    y = references.moe(x, ids, weights, *weights_of.values(), activation)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_slots_add_up_in_order() -> None:
    """1e8 - 1e8 + 1 is 1 in slot order only."""
    ids = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0]], dtype=torch.int32)
    weights = torch.tensor([[1e8, -1e8, 1.0]]).expand(3, -1)
    square = torch.full((3, 16, 16), 1 / 16)
    y = references.moe(torch.ones(3, 16), ids, weights, square, square, "relu2")
    assert torch.equal(y, torch.ones(3, 16))


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        references.moe(*subject("moe", "gelu", F=24, K=2, E=6, J=40, I=40).arguments(3))
