"""The causal convolution against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from kit.grid import CONV4, CONV_16, CONV_48, CONV_ODD, Subject, formed, int32, rel_error

from hemiola.plugins.conv import cpu as conv_cpu

# fp32 on both sides: another order of W additions, and silu through exp
TOLERANCE = 1e-6


@formed(reference=(CONV4, CONV_ODD), torch=(CONV4, CONV_ODD), compiled=(CONV_16, CONV_48))
@pytest.mark.parametrize("num", [1, 2, 3, 4, 33])
def test_torch_says_the_same(subject: Subject, num: int, form: str) -> None:
    (x,), (weight, bias) = subject.tokens(num, seed=num), subject.constants()
    (columns,) = subject.states(2, 16, 0)
    y = subject.form(form)(x, weight, bias, columns, int32(0, num), int32(1), *[int32(0)] * 5, 16)
    padded = F.pad(x.mT[None], (weight.shape[1] - 1, 0))
    theirs = F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))
    assert rel_error(y, theirs[0].mT) < TOLERANCE


@formed(torch=[CONV4], compiled=[CONV_16])
def test_large_inputs_do_not_overflow(subject: Subject, form: str) -> None:
    weight, bias = subject.constants()
    x = torch.full((40, len(bias)), 1e4) * torch.linspace(-1, 1, len(bias))
    (columns,) = subject.states(2, 16, 0)
    y = subject.form(form)(x, weight, bias, columns, int32(0, 40), int32(1), *[int32(0)] * 5, 16)
    assert y.isfinite().all()


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps are convolved some places at a time."""
    (x,), (weight, bias) = CONV4.tokens(57, seed=1), CONV4.constants()

    def run() -> torch.Tensor:
        (columns,) = CONV4.states(3, 16, 0)
        rows = (int32(0, 40, 57), int32(1, 2), *[int32(0, 0)] * 5)
        return CONV4.form("torch")(x, weight, bias, columns, *rows, 16)

    whole = run()
    for places in (1, 7, 58):
        monkeypatch.setattr(conv_cpu, "IN_CACHE", 12 * places)
        assert torch.equal(run(), whole)
