"""The exact dense layer against torch's, and a row's bits against the same row in any company."""

import pytest
import torch
import torch.nn.functional as F

from hemiola.plugins import references

linear = torch.ops.hemiola.linear
NONE = torch.empty(0)
SIZES = (64, 100, 256, 1288, 4096)


def make(num_tokens: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32) -> list:
    print("seed", 0)
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return [y.to(dtype) for y in (x, weight * num_inputs**-0.5, bias)]


def close(num_inputs: int, dtype: torch.dtype) -> dict[str, float]:
    """Outputs of size 1, summed in another order: errors grow as the root of the length; one rounding."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * eps * num_inputs**0.5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "num_tokens, num_inputs, num_outputs", [(3, 40, 24), (0, 40, 24), (33, 300, 1), (32, 8, 17)]
)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_reference(
    num_tokens: int, num_inputs: int, num_outputs: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make(num_tokens, num_inputs, num_outputs, dtype)
    y = linear(x, weight, bias if biased else NONE)
    expected = references.linear(x, weight, bias if biased else NONE)
    torch.testing.assert_close(y, expected, **close(num_inputs, dtype))
    assert y.is_contiguous()


@pytest.mark.parametrize("num_inputs", SIZES)
@pytest.mark.parametrize("num_outputs", SIZES)
def test_equals_torch_linear(num_inputs: int, num_outputs: int) -> None:
    x, weight, bias = make(5, num_inputs, num_outputs)
    torch.testing.assert_close(
        linear(x, weight, bias), F.linear(x, weight, bias), **close(num_inputs, x.dtype)
    )


@pytest.mark.parametrize("num_inputs", SIZES)
@pytest.mark.parametrize("num_outputs", [1, 5, *SIZES])
def test_row_bits_do_not_depend_on_neighbours(num_inputs: int, num_outputs: int) -> None:
    x, weight, bias = make(160, num_inputs, num_outputs)
    expected = linear(x, weight, bias)
    for num_tokens in (1, 2, 8, 31, 32, 33, 96):
        assert torch.equal(linear(x[:num_tokens], weight, bias), expected[:num_tokens]), f"{num_tokens} rows"
    for shift in (1, 13, 95):
        assert torch.equal(linear(x.roll(shift, 0), weight, bias), expected.roll(shift, 0)), (
            f"moved by {shift}"
        )
    lonely = torch.full_like(x[:32], torch.inf)
    lonely[7] = x[3]
    assert torch.equal(linear(lonely, weight, bias)[7], expected[3]), "other neighbours"


@pytest.mark.parametrize("num_inputs", [100, 256, 1288])
@pytest.mark.parametrize("num_outputs", [1, 64, 1288])
def test_row_bits_do_not_depend_on_threads(num_inputs: int, num_outputs: int, threads: int) -> None:
    x, weight, bias = make(160, num_inputs, num_outputs)
    torch.set_num_threads(1)
    expected = linear(x, weight, bias)
    torch.set_num_threads(threads)
    for num_tokens in (1, 32, 160):
        assert torch.equal(linear(x[:num_tokens], weight, bias), expected[:num_tokens]), f"{num_tokens} rows"


def test_strided_rows_keep_their_bits() -> None:
    """A layer may be called on a slice of a fused projection's output."""
    x, weight, bias = make(64, 300, 72)
    fused = torch.cat([x, x, x], dim=1)
    assert torch.equal(linear(fused[:, 300:600], weight, bias), linear(x, weight, bias))
