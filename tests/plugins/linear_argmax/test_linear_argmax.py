"""The best output: what argmax says of the stored outputs, on both devices' truth."""

import pytest
import torch
from kit.ops import rel_error

from hemiola.plugins import references

NONE = torch.empty(0)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_reference_is_argmax_of_the_rounded_outputs(biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=rng).bfloat16() for shape in ((7, 8), (500, 8), (500,)))
    given = bias if biased else NONE
    lines, (value, output) = references.linear(x, weight, given), references.linear_argmax(x, weight, given)
    assert value.dtype is torch.float32 and output.dtype is torch.int64
    assert output.tolist() == [line.index(max(line)) for line in lines.tolist()]
    assert rel_error(value, lines.amax(1).float()) == 0


def test_a_line_with_nan_has_no_best_number() -> None:
    weight = torch.tensor([[1.0], [torch.nan], [3.0]])
    value, output = references.linear_argmax(torch.ones(2, 1), weight, NONE)
    assert value.isinf().all() and output.tolist() == [1, 1]
