"""Gates on CUDA."""

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.gate.cuda import gate
from tests.gpu.laws import (
    DEVICE,
    HALF,
    MANY,
    apart,
    error,
    needs_memory,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
)

pytestmark = on_gpu


def truth(x: torch.Tensor, opening: torch.Tensor, kind: str) -> torch.Tensor:
    x, opening = x.double(), opening.double()
    return x * opening.sigmoid() * (opening if kind == "silu" else 1)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("width", [1, 100, 2048, 12288])
def test_against_fp64(kind: str, width: int, dtype: torch.dtype) -> None:
    x, opening = randn(5, width, dtype=dtype), randn(5, width, dtype=dtype)
    with poisoned():
        for one in (opening, opening[:, :1]):
            y = gate(apart(x), apart(one), kind)
            assert error(y, truth(x, one, kind)) < (5e-7 if dtype is torch.float32 else 5e-3)


def test_gates_far_out_are_shut_or_open() -> None:
    opening = torch.tensor([[-1e4, 1e4, -60.0, 60.0]], dtype=HALF, device=DEVICE)
    x = torch.ones_like(opening)
    assert gate(x, opening, "sigmoid").tolist() == [[0.0, 1.0, pytest.approx(0.0), 1.0]]
    assert gate(x, opening, "silu")[0, 0] == 0 and gate(x, opening, "silu")[0, 3] == 60


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_a_row_is_alone(kind: str) -> None:
    rows_are_alone(lambda x, g: gate(x, g, kind), randn(MANY, 520), randn(MANY, 520))


@needs_memory
def test_rows_behind_two_to_the_31() -> None:
    x = torch.ones(540_000, 4096, dtype=HALF, device=DEVICE)
    x[-1] = randn(4096)
    y = gate(x, x[:, :1], "sigmoid")
    assert error(y[-1], truth(x[-1:], x[-1:, :1], "sigmoid")[0]) < 5e-3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="kind is 'relu'"):
        gate(randn(2, 8), randn(2, 8), "relu")
    with pytest.raises(ValueError, match="gate has the shape"):
        gate(randn(2, 8), randn(2, 7), "silu")
    with pytest.raises(ValueError, match="neighbours side by side"):
        gate(randn(8, 2).t(), randn(2, 8), "silu")
