"""What a dense layer ends as, on CUDA: the reference; test_triton.py has the laws of its kernels."""

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins import OPS, references
from tests.gpu.laws import apart, on_gpu, poisoned, randn

pytestmark = on_gpu
WIDTH = {"": 96, "relu2": 96, "swiglu": 48}


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("ending", WIDTH)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_it_is_the_reference(num_tokens: int, ending: str, added: bool) -> None:
    linear = OPS["linear"].function("cuda")
    x, weight, none = randn(num_tokens, 40), randn(96, 40) * 40**-0.5, randn(0)
    residual = apart(randn(num_tokens, WIDTH[ending])) if added else None
    with poisoned():
        y = linear(apart(x), weight, none, residual, ending)
    given = [None if part is None else part.float().cpu() for part in (x, weight, none, residual)]
    assert y.dtype is x.dtype and rel_error(y, references.linear(*given, ending)) < 4e-3


def test_no_tokens() -> None:
    swiglu, plain = (OPS[name].bind("cuda", ()) for name in ("linear_swiglu", "linear"))
    assert swiglu(randn(0, 16), randn(32, 16), randn(0)).shape == (0, 16)
    assert not torch.isnan(plain(randn(1, 16), randn(32, 16), randn(0))).any()
