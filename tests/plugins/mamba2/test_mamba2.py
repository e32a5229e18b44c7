"""Mamba2 against transformers' own words for it: the update of one token and the scan over chunks."""

import pytest
import torch
from kit.grid import MAMBA, MAMBA_16, MAMBA_80, MAMBA_ODD, Subject, formed, int32, rel_error
from transformers.models.nemotron_h.modeling_nemotron_h import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

# fp32 on both sides: another order of the same sums; dt has passed softplus and the clamp to (0, inf) already
TOLERANCE = 2e-6


@formed(reference=(MAMBA, MAMBA_ODD), torch=(MAMBA, MAMBA_ODD), compiled=(MAMBA_16, MAMBA_80))
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same(subject: Subject, num: int, form: str) -> None:
    tokens, (A, D) = subject.tokens(num, seed=num), subject.constants()
    x, B, C, dt = tokens
    states = subject.states(2, 16, 0)
    y = subject.form(form)(*tokens, A, D, *states, int32(0, num), int32(1), *[int32(0)] * 5, 16)

    wide_A, wide_D = A[:, None, None].expand(states[0].shape[1:]), D[:, None].expand(x.shape[1:])
    state, by_token = torch.zeros(1, *states[0].shape[1:]), []
    at_edge = state.clone()
    for t in range(num):
        dt_t = dt[t][None, :, None].expand(1, *x.shape[1:])
        by_token.append(
            mamba2_selective_state_update(
                state, x[t : t + 1], dt_t, wide_A, B[t : t + 1], C[t : t + 1], wide_D
            )
        )
        if (t + 1) % 16 == 0:
            at_edge = state.clone()
    assert rel_error(y, torch.cat(by_token)) < TOLERANCE
    assert rel_error(states[0][1:], at_edge) < TOLERANCE

    by_chunk = mamba2_chunk_scan(
        x[None], dt[None], A, B[None], C[None], chunk_size=32, D=D, dt_limit=(0.0, float("inf"))
    )
    by_chunk = by_chunk[0] if isinstance(by_chunk, tuple) else by_chunk
    assert rel_error(y, by_chunk.reshape(y.shape)) < TOLERANCE
