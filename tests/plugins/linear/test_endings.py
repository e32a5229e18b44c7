"""What a dense layer ends as: the reference is torch's in fp64, with nothing rounded between."""

import pytest
import torch
import torch.nn.functional as F
from kit.ops import rel_error

from hemiola.plugins import OPS, references
from hemiola.plugins.linear.spec import by_eights

NONE = torch.empty(0)


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("ending", ["", "relu2", "swiglu"])
def test_it_is_torchs(ending: str, added: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=rng).double() for shape in ((5, 17), (48, 17), (48,)))
    y = F.linear(x, weight, bias)
    if ending == "relu2":
        y = F.relu(y) ** 2
    if ending == "swiglu":
        gate, value = y.chunk(2, dim=1)
        y, weight, bias = F.silu(gate) * value, by_eights(weight), by_eights(bias)
    residual = torch.randn(y.shape, generator=rng).double() if added else None
    found = references.linear(x, weight, bias, residual, ending)
    torch.testing.assert_close(found, y if residual is None else y + residual)


def test_a_sum_is_rounded_once() -> None:
    """1 + 2^-9 is 1 in bfloat16, and with -1 it is 2^-9."""
    x, weight = torch.tensor([[1.0, 2.0**-9]]).bfloat16(), torch.ones(1, 2).bfloat16()
    found = references.linear(x, weight, NONE, -torch.ones(1, 1).bfloat16())
    assert found.dtype is torch.bfloat16 and found.item() == 2.0**-9


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_best_is_argmax_of_the_rounded_outputs(biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=rng).bfloat16() for shape in ((7, 8), (500, 8), (500,)))
    given = bias if biased else NONE
    lines, (value, output) = (
        references.linear(x, weight, given),
        OPS["linear_argmax"].torch_op(x, weight, given),
    )
    assert value.dtype is torch.float32 and output.dtype is torch.int64
    assert output.tolist() == [line.index(max(line)) for line in lines.tolist()]
    assert rel_error(value, lines.amax(1).float()) == 0


def test_a_line_with_nan_has_no_best_number() -> None:
    weight = torch.tensor([[1.0], [torch.nan], [3.0]])
    value, output = references.linear(torch.ones(2, 1), weight, NONE, ending="argmax")
    assert value.isinf().all() and output.tolist() == [1, 1]


def test_gates_that_do_not_stand_by_eights_are_refused() -> None:
    op, half = OPS["linear_swiglu"], torch.bfloat16
    call = op.call(torch.empty(3, 16, dtype=half), torch.empty(40, 16, dtype=half), NONE)
    with pytest.raises(ValueError, match="40 outputs are not eight gates, eight values, and so on"):
        op.choose(call, "cuda")


@pytest.mark.parametrize("ending", [ending.name for ending in OPS["linear"].endings])
def test_endings_of_a_form_are_endings_of_the_op_and_no_form_on_cpus_has_one(ending: str) -> None:
    op = OPS[f"linear_{ending}"]
    assert op.runs_on("cuda") and not op.runs_on("cpu")
    assert [form.name for form in op.forms] == ["cuda", "coded", "e4m3"]
