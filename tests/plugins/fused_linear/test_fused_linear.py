"""The reference against torch, in fp64: layer, activation and sum, nothing rounded between them."""

import pytest
import torch
import torch.nn.functional as F

from hemiola.plugins import OPS, references
from hemiola.plugins.fused_linear.spec import by_eights

WIDTH = {"none": 48, "relu2": 48, "swiglu": 24}
NONE = torch.empty(0)


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("activation", WIDTH)
def test_it_is_torchs(activation: str, added: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=rng).double() for shape in ((5, 17), (48, 17), (48,)))
    residual = torch.randn(5, WIDTH[activation], generator=rng).double() if added else NONE.double()
    y = F.linear(x, weight, bias)
    if activation == "relu2":
        y = F.relu(y) ** 2
    if activation == "swiglu":
        gate, value = y.chunk(2, dim=1)
        y, weight, bias = F.silu(gate) * value, by_eights(weight), by_eights(bias)
    found = references.fused_linear(x, weight, bias, residual, activation, WIDTH[activation])
    torch.testing.assert_close(found, y + residual if added else y)


def test_a_sum_is_rounded_once() -> None:
    """1 + 2^-9 is 1 in bfloat16, and with -1 it is 2^-9."""
    x, weight = torch.tensor([[1.0, 2.0**-9]]).bfloat16(), torch.ones(1, 2).bfloat16()
    found = references.fused_linear(x, weight, NONE, -torch.ones(1, 1).bfloat16(), "none", 1)
    assert found.dtype is torch.bfloat16 and found.item() == 2.0**-9


@pytest.mark.parametrize(
    ("activation", "width", "reason"),
    [
        ("gelu", 48, "activation is 'gelu', not one of none, relu2, swiglu"),
        ("relu2", 24, "48 outputs do not end as 24 with relu2"),
        ("swiglu", 48, "48 outputs do not end as 48 with swiglu"),
        ("swiglu", 20, "20 gates are no multiple of 8"),
    ],
)
def test_refusals(activation: str, width: int, reason: str) -> None:
    op, half = OPS["fused_linear"], torch.bfloat16
    x, weight = torch.empty(3, 16, dtype=half), torch.empty(40 if width == 20 else 48, 16, dtype=half)
    call = op.call(x, weight, NONE, NONE, activation, width)
    with pytest.raises(ValueError, match=reason):
        op.choose(call, "cuda")
