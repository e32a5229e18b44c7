"""Experts with inputs and weights in e4m3 on CUDA; limits as in tests/plugins/linear/test_e4m3.py."""

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.lines import pack_lines
from hemiola.plugins.groups import Layout
from hemiola.plugins.moe.e4m3 import moe
from hemiola.plugins.moe.reference import moe_e4m3
from hemiola.plugins.moe.spec import ACTIVATIONS
from tests.gpu.laws import DEVICE, LENGTHS, apart, on_gpu, poisoned, rows_are_alone
from tests.plugins.linear.test_narrow_inputs import make

pytestmark = on_gpu
INNER, WIDTH, NUM = 144, 96, 5


@pytest.mark.parametrize("by, activation", [("group", "relu2"), ("static", "swiglu")])
def test_experts_are_those_of_the_reference(by: str, activation: str) -> None:
    """An id that is no expert adds nothing; a code of `hidden` may be the next one (1 of 16), rarely."""
    layout, num_hidden = Layout("e4m3", 0, (), by), INNER * ACTIVATIONS[activation]
    up = make(layout, NUM, num_hidden, WIDTH, static=torch.arange(1.0, 6) / 100)
    down = make(layout, NUM, WIDTH, INNER, static=torch.arange(1.0, 6) * 300, seed=4)
    rng = torch.Generator().manual_seed(2)
    x, shares = torch.randn(17, WIDTH, generator=rng), torch.rand(17, 3, generator=rng)
    ids = torch.rand(17, NUM, generator=rng).argsort(1)[:, :3].int()
    wanted = moe_e4m3(x, ids, shares, up, down, activation)
    packed = [pack_lines(each).to(DEVICE) for each in (up, down)]

    def run(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        with poisoned():
            return moe(apart(x), ids, shares, *packed, activation, INNER, layout, layout)

    given = [each.to(DEVICE) for each in (x, ids, shares)]
    assert rel_error(run(*given).cpu(), wanted) < 2e-2
    rows_are_alone(run, *given, lengths=LENGTHS[-2:])
    ids[2, 1] = -1
    alone = moe_e4m3(x[2:3], ids[2:3, ::2], shares[2:3, ::2], up, down, activation)
    assert rel_error(run(given[0], ids.to(DEVICE), given[2])[2:3].cpu(), alone) < 2e-2
