"""Mamba2 against transformers' own words for it: the update of one token and the scan over chunks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.grid import LIMITS, MAMBA, MAMBA_16, MAMBA_80
from kit.ops import Subject, formed, rel_error, row, same_bits
from transformers.models.nemotron_h.modeling_nemotron_h import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from hemiola.plugins.cpu.simd import LANES
from hemiola.plugins.mamba2.compiled import dots

# fp32 on both sides: another order of the same sums
TOLERANCE = 2e-6
FORMS = formed(reference=[MAMBA], compiled=(MAMBA_16, MAMBA_80))


@FORMS
@pytest.mark.parametrize("num", [1, 5, 16, 70])
def test_transformers_says_the_same(subject: Subject, num: int, form: str) -> None:
    subject = replace(subject, attrs=(0.0, math.inf))  # its update of one token has no limits
    x, B, C, dt = tokens = subject.tokens(num, seed=num)
    dt_bias, A, D = subject.constants()
    states = subject.states(2, 16, 0)
    y = subject.run(form, tokens, states, [row(num_tokens=num)], 16)

    def wide(value: torch.Tensor) -> torch.Tensor:  # [.., H] -> [.., H, P]
        return value[..., None].expand(*value.shape, x.shape[2])

    state, by_token = torch.zeros(1, *states[0].shape[1:]), []
    at_edge = state.clone()
    for t in range(num):
        token = (x[t : t + 1], wide(dt[t : t + 1]), A[:, None, None].expand(state.shape[1:]))
        words = {"dt_bias": wide(dt_bias), "dt_softplus": True}
        by_token.append(
            mamba2_selective_state_update(state, *token, B[t : t + 1], C[t : t + 1], wide(D), **words)
        )
        if (t + 1) % 16 == 0:
            at_edge = state.clone()
    assert rel_error(y, torch.cat(by_token)) < TOLERANCE
    assert rel_error(states[0][1:], at_edge) < TOLERANCE


@FORMS
@pytest.mark.parametrize("limits", [(0.0, math.inf), LIMITS, (0.1, 0.11)], ids=str)
def test_transformers_scan_says_the_same_with_limits(
    subject: Subject, form: str, limits: tuple[float, float]
) -> None:
    subject = replace(subject, attrs=limits)
    x, B, C, dt = tokens = subject.tokens(70, seed=1)
    dt_bias, A, D = subject.constants()
    y = subject.run(form, tokens, subject.states(2, 16, 0), [row(num_tokens=70)], 16)
    options = {"chunk_size": 32, "D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": limits}
    words = mamba2_chunk_scan(x[None], dt[None], A, B[None], C[None], **options)
    words = words[0] if isinstance(words, tuple) else words
    assert rel_error(y, words.reshape(y.shape)) < TOLERANCE


@FORMS
def test_records_keep_the_step_and_not_what_it_was_made_from(subject: Subject, form: str) -> None:
    """Replay would pass softplus a second time."""
    tokens, states = subject.tokens(5, seed=2), subject.states(2, 16, 0)
    subject.run(form, tokens, states, [row(num_tokens=5)], 16)
    dt_bias = subject.constants()[0]
    steps = torch.nn.functional.softplus(tokens[3] + dt_bias).clamp(*subject.attrs)
    torch.testing.assert_close(states[3][1, :5], steps, rtol=1e-6, atol=0)
    assert all(same_bits(ring[1, :5], tokens[i]) for i, ring in enumerate(states[1:3]))


@FORMS
def test_a_step_without_bound_forgets_and_does_not_overflow(subject: Subject, form: str) -> None:
    tokens = subject.tokens(40, seed=3)
    tokens[3][::2] = 1e4
    wide = replace(subject, attrs=(0.0, math.inf))
    states = wide.states(2, 16, 0)
    y = wide.run(form, tokens, states, [row(num_tokens=40)], 16)
    assert y.isfinite().all() and states[0][1].isfinite().all()


@pytest.mark.parametrize("num_outputs,num_inputs", [(16, 16), (48, 64), (16, 80), (32, 208)])
def test_dots(num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal(7 + num_outputs * num_inputs).astype(np.float32)
    x = rng.standard_normal(3 + num_inputs).astype(np.float32)
    out, products = np.full(5 + num_outputs + 1, 9, np.float32), np.full(LANES * LANES, np.nan, np.float32)
    at = [array.ctypes.data for array in (weight, x, out, products)]
    dots(at[0], 7, num_outputs, num_inputs, at[1], 3, at[2], 5, at[3])
    exact = weight[7:].reshape(num_outputs, num_inputs).astype(np.float64) @ x[3:]
    assert np.abs(out[5:-1] - exact).max() < 1e-5 and out[-1] == out[4] == 9
