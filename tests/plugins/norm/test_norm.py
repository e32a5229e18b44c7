"""RMS norm against torch's."""

import pytest
import torch
import torch.nn.functional as F
from kit.ops import both_forms, subject

NONE = torch.empty(0)


norm = both_forms("norm")


def make(width: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, gate, weight = subject("norm", W=width).tokens(5, 0) + subject("norm", W=width).constants()
    return 3 * x, 3 * gate, weight


@pytest.mark.parametrize("width,group_len", [(16, 16), (64, 64), (96, 48), (4096, 512)])
def test_equals_torch_rms_norm(norm, width: int, group_len: int) -> None:
    """Groups of channels are norms of their own."""
    x, _, weight = make(width)
    expected = F.rms_norm(x.view(5, -1, group_len), (group_len,), eps=1e-5).flatten(1) * weight
    torch.testing.assert_close(norm(x, NONE, weight, 1e-5, group_len, False), expected)


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_zeros_stay_zeros_and_eps_counts(norm, eps: float) -> None:
    x, _, weight = make()
    assert (norm(torch.zeros_like(x), NONE, weight, eps, 64, False) == 0).all()
    expected = F.rms_norm(x * 1e-3, (64,), weight, eps)
    torch.testing.assert_close(norm(x * 1e-3, NONE, weight, eps, 64, False), expected)


def test_gate_before_and_after_are_silu(norm) -> None:
    """F.silu is the outside word; it rounds differently in the last bit."""
    x, gate, weight = make()
    first = F.rms_norm(x * F.silu(gate), (64,), weight, 1e-5)
    after = F.rms_norm(x, (64,), weight, 1e-5) * F.silu(gate)
    torch.testing.assert_close(norm(x, gate, weight, 1e-5, 64, True), first, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(x, gate, weight, 1e-5, 64, False), after, rtol=1e-5, atol=1e-6)


def test_gate_of_large_magnitude_stays_finite(norm) -> None:
    x, _, weight = make()
    gate = torch.full_like(x, -200.0)
    assert torch.equal(norm(x, gate, weight, 1e-5, 64, False), torch.zeros_like(x))
    plain = norm(x, NONE, weight, 1e-5, 64, False)
    assert torch.equal(norm(x, -gate, weight, 1e-5, 64, False), plain * 200)
