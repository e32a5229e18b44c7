"""The causal convolution against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from kit.grid import CONV4, CONV_16, CONV_48
from kit.ops import Subject, formed, rel_error, row

# fp32 on both sides: another order of W additions, and silu through exp
TOLERANCE = 1e-6


@formed(reference=[CONV4], compiled=(CONV_16, CONV_48))
@pytest.mark.parametrize("num", [1, 2, 3, 4, 33])
def test_torch_says_the_same(subject: Subject, num: int, form: str) -> None:
    (x,), (weight, bias) = subject.tokens(num, seed=num), subject.constants()
    y = subject.run(form, [x], subject.states(2, 16, 0), [row(num_tokens=num)], 16)
    padded = F.pad(x.mT[None], (weight.shape[1] - 1, 0))
    theirs = F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))
    assert rel_error(y, theirs[0].mT) < TOLERANCE


@formed(compiled=[CONV_16])
def test_large_inputs_do_not_overflow(subject: Subject, form: str) -> None:
    x = torch.full((40, 16), 1e4) * torch.linspace(-1, 1, 16)
    y = subject.run(form, [x], subject.states(2, 16, 0), [row(num_tokens=40)], 16)
    assert y.isfinite().all()
