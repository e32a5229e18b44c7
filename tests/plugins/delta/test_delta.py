"""The gated delta rule against transformers' own words for it, and where its numbers are hard."""

import pytest
import torch
from kit.grid import (
    COMPILED,
    GDN,
    GDN_16,
    GDN_64,
    GDN_80,
    GDN_ODD,
    KDA,
    KDA_16,
    Subject,
    Tensors,
    formed,
    int32,
    rel_error,
    subject,
)
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from hemiola.plugins.delta.spec import DELTA

# fp32 on both sides: another order of the same sums
TOLERANCE = 2e-6
HARD = formed(torch=(GDN, KDA), compiled=(GDN_64, KDA_16))
KDA_SIZES = pytest.param(*COMPILED.values, (16, 80), marks=COMPILED.marks)


def plain(
    case: Subject, form: str, tokens: Tensors, chunk_len: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a fresh row, and the state at its last edge."""
    num = tokens[0].shape[0]
    states = case.states(2, chunk_len, 0, tokens[0].dtype)
    o = case.form(form)(*tokens, *states, int32(0, num), int32(1), *[int32(0)] * 5, chunk_len)
    return o, states[0][1]


@formed(reference=(GDN, GDN_ODD), torch=(GDN, GDN_ODD), compiled=(GDN_16, GDN_64, GDN_80))
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same(subject: Subject, num: int, form: str) -> None:
    q, k, v, g, beta = subject.tokens(num, seed=num)
    o, state = plain(subject, form, [q, k, v, g, beta])
    edge = num // 16 * 16
    for word in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        rows = [value[None] for value in (q * q.shape[-1] ** 0.5, k, v, g[..., 0], beta)]
        theirs, _ = word(*rows)
        at_edge = torch.zeros_like(state)
        if edge:
            _, at_edge = word(*(value[:, :edge] for value in rows), output_final_state=True)
        assert rel_error(o, theirs[0]) < TOLERANCE
        assert rel_error(state, at_edge.view(state.shape)) < TOLERANCE


@pytest.mark.parametrize("form,sizes", [("reference", (8, 5)), ("torch", (8, 5)), KDA_SIZES])
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same_of_kda(num: int, form: str, sizes: tuple[int, int]) -> None:
    case = subject(DELTA, G=3, K=sizes[0], H=3, V=sizes[1], J=sizes[0])
    q, k, v, g, beta = case.tokens(num, seed=num)
    o, _ = plain(case, form, [q, k, v, g, beta])
    theirs, _ = recurrent_kimi_delta_attention(
        *(value[None] for value in (q * q.shape[-1] ** 0.5, k, v, g, beta)), None, False
    )
    assert rel_error(o, theirs[0]) < TOLERANCE


@pytest.mark.parametrize("chunk_len", [8, 16, 32, 64])
@pytest.mark.parametrize("decay", [1e-4, 1.0, 20.0])
@HARD
def test_decays_from_none_to_strong(subject: Subject, form: str, decay: float, chunk_len: int) -> None:
    """g down to -20 per token, strong and weak ones side by side."""
    tokens = subject.tokens(3 * chunk_len + 1, seed=1)
    tokens[3] = tokens[3] / 0.3 * decay
    tokens[3][1::3] *= 1e-3
    o, state = plain(subject, form, tokens, chunk_len)
    wanted, at_edge = plain(subject, "reference", [token.double() for token in tokens], chunk_len)
    assert rel_error(o, wanted) < 1e-5
    assert rel_error(state, at_edge) < 1e-5


@HARD
def test_the_same_key_again_and_again(subject: Subject, form: str) -> None:
    """beta near 1, no decay, one key: powers of the matrix to invert grow, its inverse does not."""
    tokens = subject.tokens(50, seed=2)
    tokens[1][:] = tokens[1][:1]
    tokens[3][:] = -1e-5
    tokens[4][:] = 0.999
    o, state = plain(subject, form, tokens)
    wanted, at_edge = plain(subject, "reference", [token.double() for token in tokens])
    assert rel_error(o, wanted) < 1e-5
    assert rel_error(state, at_edge) < 1e-5


@formed(reference=(GDN, KDA), torch=(GDN, KDA), compiled=(GDN_64, KDA_16))
def test_decay_without_bound_does_not_overflow(subject: Subject, form: str) -> None:
    tokens = subject.tokens(40, seed=3)
    tokens[3][::2] = -1e4
    o, state = plain(subject, form, tokens)
    assert o.isfinite().all()
    assert state.isfinite().all()


def test_a_chunk_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_len is 12"):
        plain(GDN, "torch", GDN.tokens(3, 0), chunk_len=12)
