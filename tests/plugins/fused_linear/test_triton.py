"""The fused layer on CUDA: the reference; tests/plugins/linear/test_triton.py has the laws of its kernels."""

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins import references
from hemiola.plugins.fused_linear.cuda import fused_linear
from tests.gpu.laws import apart, on_gpu, poisoned, randn

pytestmark = on_gpu
WIDTH = {"none": 96, "relu2": 96, "swiglu": 48}


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("activation", WIDTH)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_it_is_the_reference(num_tokens: int, activation: str, added: bool) -> None:
    x, weight, none = randn(num_tokens, 40), randn(96, 40) * 40**-0.5, randn(0)
    residual = apart(randn(num_tokens, WIDTH[activation])) if added else none
    end = (activation, WIDTH[activation])
    with poisoned():
        y = fused_linear(apart(x), weight, none, residual, *end)
    wanted = references.fused_linear(*(part.float().cpu() for part in (x, weight, none, residual)), *end)
    assert y.dtype is x.dtype and rel_error(y, wanted) < 4e-3


def test_no_tokens() -> None:
    x, weight = randn(0, 16), randn(32, 16)
    assert fused_linear(x, weight, x[0:0, 0], x[0:0, 0], "swiglu", 16).shape == (0, 16)
    assert not torch.isnan(fused_linear(randn(1, 16), weight, randn(0), randn(0), "none", 32)).any()
