"""The gated delta rule against transformers' own words for it, and where its numbers are hard."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from hemiola.plugins.delta.spec import DELTA
from tests.plugins.grid import GDN, GDN_ODD, KDA, Subject, Tensors, int32, rel_error, subject

# fp32 on both sides: another order of the same sums
TOLERANCE = 2e-6


def plain(
    case: Subject, form: str, tokens: Tensors, chunk_len: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a fresh row, and the state at its last edge."""
    num = tokens[0].shape[0]
    states = case.states(2, chunk_len, 0, tokens[0].dtype)
    o = case.form(form)(*tokens, *states, int32(0, num), int32(1), *[int32(0)] * 5, chunk_len)
    return o, states[0][1]


@pytest.mark.parametrize("form", ["reference", "cpu"])
@pytest.mark.parametrize("num", [1, 5, 16, 70])
@pytest.mark.parametrize("case", [GDN, GDN_ODD], ids=str)
def test_transformers_says_the_same(case: Subject, num: int, form: str) -> None:
    q, k, v, g, beta = case.tokens(num, seed=num)
    o, state = plain(case, form, [q, k, v, g, beta])
    edge = num // 16 * 16
    for word in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        rows = [value[None] for value in (q * q.shape[-1] ** 0.5, k, v, g[..., 0], beta)]
        theirs, _ = word(*rows)
        at_edge = torch.zeros_like(state)
        if edge:
            _, at_edge = word(*(value[:, :edge] for value in rows), output_final_state=True)
        assert rel_error(o, theirs[0]) < TOLERANCE
        assert rel_error(state, at_edge.view(state.shape)) < TOLERANCE


@pytest.mark.parametrize("form", ["reference", "cpu"])
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same_of_kda(num: int, form: str) -> None:
    case = subject(DELTA, G=3, K=8, H=3, V=5, J=8)
    q, k, v, g, beta = case.tokens(num, seed=num)
    o, _ = plain(case, form, [q, k, v, g, beta])
    theirs, _ = recurrent_kimi_delta_attention(
        *(value[None] for value in (q * q.shape[-1] ** 0.5, k, v, g, beta)), None, False
    )
    assert rel_error(o, theirs[0]) < TOLERANCE


@pytest.mark.parametrize("chunk_len", [8, 16, 32, 64])
@pytest.mark.parametrize("decay", [1e-4, 1.0, 20.0])
@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_decays_from_none_to_strong(case: Subject, decay: float, chunk_len: int) -> None:
    """g down to -20 per token, strong and weak ones side by side."""
    tokens = case.tokens(3 * chunk_len + 1, seed=1)
    tokens[3] = tokens[3] / 0.3 * decay
    tokens[3][1::3] *= 1e-3
    o, state = plain(case, "cpu", tokens, chunk_len)
    wanted, at_edge = plain(case, "reference", [token.double() for token in tokens], chunk_len)
    assert rel_error(o, wanted) < 1e-5
    assert rel_error(state, at_edge) < 1e-5


@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_the_same_key_again_and_again(case: Subject) -> None:
    """beta near 1, no decay, one key: powers of the matrix to invert grow, its inverse does not."""
    tokens = case.tokens(50, seed=2)
    tokens[1][:] = tokens[1][:1]
    tokens[3][:] = -1e-5
    tokens[4][:] = 0.999
    o, state = plain(case, "cpu", tokens)
    wanted, at_edge = plain(case, "reference", [token.double() for token in tokens])
    assert rel_error(o, wanted) < 1e-5
    assert rel_error(state, at_edge) < 1e-5


@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_decay_without_bound_does_not_overflow(case: Subject) -> None:
    tokens = case.tokens(40, seed=3)
    tokens[3][::2] = -1e4
    for form in ("reference", "cpu"):
        o, state = plain(case, form, tokens)
        assert o.isfinite().all()
        assert state.isfinite().all()


def test_a_chunk_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_len is 12"):
        plain(GDN, "cpu", GDN.tokens(3, 0), chunk_len=12)
