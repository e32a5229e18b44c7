"""The dense layer's reference against torch's; test_compiled.py has the compiled form."""

import pytest
import torch
import torch.nn.functional as F

from hemiola.plugins import references

NONE = torch.empty(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(3, 40, 24), (0, 40, 24), (33, 300, 1), (5, 1288, 17)], ids=str)
def test_the_reference_equals_torch_linear(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Outputs of size 1, summed in another order: errors grow as the root of the length; one rounding."""
    num_tokens, num_inputs, num_outputs = sizes
    rng = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    x, weight, bias = (torch.randn(shape, generator=rng).to(dtype) for shape in shapes)
    weight *= num_inputs**-0.5
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * eps * num_inputs**0.5}
    for given, theirs in ((bias, bias), (NONE, None)):
        y = references.linear(x, weight, given)
        expected = F.linear(x.double(), weight.double(), None if theirs is None else theirs.double())
        torch.testing.assert_close(y, expected.to(dtype), **close)
