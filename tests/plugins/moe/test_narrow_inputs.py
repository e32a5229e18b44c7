"""Experts whose inputs are e4m3, on a CPU: the reference's bits for one slot, and rows that are alone."""

import pytest
import torch
from kit.ops import rel_error, same_bits

from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.compiled import pack
from hemiola.plugins.moe.compiled import moe
from hemiola.plugins.moe.reference import moe_e4m3
from hemiola.plugins.moe.spec import ACTIVATIONS
from tests.plugins.linear.test_narrow_inputs import make

NUM, WIDTH, INNER = 5, 160, 144


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("by", ["group", "token", "static"])
def test_experts_are_those_of_the_reference(by: str, activation: str) -> None:
    """Each with its own static scales; several slots are added by fused multiply-adds."""
    layout, num_hidden = Layout("e4m3", 128, (), by), INNER * ACTIVATIONS[activation]
    up = make(layout, NUM, num_hidden, WIDTH, static=torch.arange(1.0, 6) / 100)
    down = make(layout, NUM, WIDTH, INNER, static=torch.arange(1.0, 6) * 300, seed=4)
    rng = torch.Generator().manual_seed(2)
    x, shares = torch.randn(40, WIDTH, generator=rng), torch.rand(40, 3, generator=rng)
    ids = torch.rand(40, NUM, generator=rng).argsort(1)[:, :3].int()

    def run(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        packed = pack(up), pack(down)
        return moe(x, ids, shares, *packed, activation, INNER, up_layout=layout, down_layout=layout)

    one = torch.ones(40, 1)
    expected = moe_e4m3(x, ids[:, :1], one, up, down, activation)
    close = rel_error(run(x, ids[:, :1], one), expected)
    assert close < 1e-3 if activation == "swiglu" else close == 0, "silu may be another in the last bit"
    y = run(x, ids, shares)
    assert rel_error(y, moe_e4m3(x, ids, shares, up, down, activation)) < 1e-3
    for few in (slice(0, 1), slice(3, 10), slice(17, 40)):
        assert same_bits(run(x[few], ids[few], shares[few]), y[few])
