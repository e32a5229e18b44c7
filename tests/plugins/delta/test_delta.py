"""The gated delta rule against transformers' own words for it, and where its numbers are hard."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit.grid import GDN, GDN_16, GDN_64, GDN_80, KDA, KDA_16
from kit.ops import Subject, Tensors, formed, rel_error, row, subject
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

# fp32 on both sides: another order of the same sums
TOLERANCE = 2e-6
HARD = formed(compiled=(GDN_64, GDN_80, KDA_16))
KIMI = [subject("delta", G=3, K=16, H=3, V=80, J=16), subject("delta", G=2, K=8, H=2, V=5, J=8)]


def plain(
    case: Subject, form: str, tokens: Tensors, chunk_len: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a fresh row, and the state at its last edge."""
    states = case.states(2, chunk_len, 0, tokens[0].dtype)
    return case.run(form, tokens, states, [row(num_tokens=len(tokens[0]))], chunk_len), states[0][1]


def words_for(case: Subject, tokens: Tensors) -> Tensors:
    """q, k, v, g, beta as models of transformers make them of a and b, with a batch of one."""
    (q, k, v, a, b), (dt_bias, A) = tokens, case.constants()
    g = A[:, None] * F.softplus(a + dt_bias)
    return [value[None] for value in (q * q.shape[-1] ** 0.5, k, v, g, b.sigmoid())]


@formed(reference=[GDN], compiled=(GDN_16, GDN_64, GDN_80))
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same(subject: Subject, num: int, form: str) -> None:
    tokens = subject.tokens(num, seed=num)
    o, state = plain(subject, form, tokens)
    q, k, v, g, beta = words_for(subject, tokens)
    edge = num // 16 * 16
    for words in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        inputs = (q, k, v, g[..., 0], beta)
        copies = [x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in inputs[:2]]
        inputs = (*copies, *inputs[2:])
        theirs, _ = words(*inputs)
        at_edge = torch.zeros_like(state)
        if edge:
            _, at_edge = words(*(value[:, :edge] for value in inputs), output_final_state=True)
        assert rel_error(o, theirs[0]) < TOLERANCE
        assert rel_error(state, at_edge.view(state.shape)) < TOLERANCE


@formed(reference=KIMI[1:], compiled=KIMI[:1])
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same_of_kda(subject: Subject, num: int, form: str) -> None:
    tokens = subject.tokens(num, seed=num)
    o, _ = plain(subject, form, tokens)
    theirs, _ = recurrent_kimi_delta_attention(*words_for(subject, tokens), None, False)
    assert rel_error(o, theirs[0]) < TOLERANCE


@pytest.mark.parametrize("decay", [1e-4, 1.0, 20.0])
@HARD
def test_decays_from_none_to_strong(subject: Subject, form: str, decay: float) -> None:
    """g down to -20 per token, strong and weak ones side by side."""
    case = replace(subject, decay=decay)
    tokens = case.tokens(49, seed=1)
    tokens[3][::3] += 3
    tokens[3][1::3] -= 10
    o, state = plain(case, form, tokens)
    wanted, at_edge = plain(case, "reference", [token.double() for token in tokens])
    assert rel_error(o, wanted) < 1e-6
    assert rel_error(state, at_edge) < 1e-6


@HARD
def test_the_same_key_again_and_again(subject: Subject, form: str) -> None:
    """beta near 1, no decay, one key."""
    tokens = subject.tokens(50, seed=2)
    tokens[1][:] = tokens[1][:1]
    tokens[3][:], tokens[4][:] = -10, 7
    o, state = plain(subject, form, tokens)
    wanted, at_edge = plain(subject, "reference", [token.double() for token in tokens])
    assert rel_error(o, wanted) < 1e-6
    assert rel_error(state, at_edge) < 1e-6


@formed(reference=(GDN, KDA), compiled=(GDN_64, KDA_16))
def test_gates_without_bound_do_not_overflow(subject: Subject, form: str) -> None:
    tokens = subject.tokens(40, seed=3)
    tokens[3][::2], tokens[3][1::4] = 1e30, -1e30
    tokens[4][::3], tokens[4][1::3] = 1e30, -1e30
    o, state = plain(subject, form, tokens)
    assert o.isfinite().all()
    assert state.isfinite().all()
