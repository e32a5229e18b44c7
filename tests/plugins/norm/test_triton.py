"""RMS norms on CUDA."""

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.norm.cuda import norm
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
    same_bits,
)

pytestmark = on_gpu
EPS = 1e-5
GATES = pytest.mark.parametrize("gated", ["plain", "before", "behind"])
SIZES = [(4096, 4096), (2688, 2688), (4096, 128), (4096, 512), (10240, 1280), (100, 100), (96, 24), (1, 1)]


def truth(x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, group_len: int, gate_first: bool):
    x, weight = x.double(), weight.double()
    opening = 1 if gate is None else gate.double() * gate.double().sigmoid()
    if gate_first:
        x = x * opening
    groups = x.view(len(x), -1, group_len)
    y = (groups / (groups.square().mean(2, keepdim=True) + EPS).sqrt()).view(x.shape) * weight
    return y if gate_first else y * opening


def run(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group_len: int, gated: str
) -> torch.Tensor:
    gate = gate if gated != "plain" else gate.new_empty(0)
    return norm(x, gate, weight, EPS, group_len, gated == "before")


@GATES
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("width, group_len", SIZES)
def test_against_fp64(width: int, group_len: int, gated: str, dtype: torch.dtype) -> None:
    x, gate, weight = randn(3, width, dtype=dtype), randn(3, width, dtype=dtype), randn(width)
    wanted = truth(x, None if gated == "plain" else gate, weight, group_len, gated == "before")
    with poisoned():
        y = run(apart(x, 16), apart(gate, 16), weight, group_len, gated)
    assert error(y, wanted) < (1e-6 if dtype is torch.float32 else 5e-3)


@GATES
@pytest.mark.parametrize("width, group_len", [(4096, 4096), (4096, 128), (10240, 1280), (100, 100)])
def test_a_row_is_alone(width: int, group_len: int, gated: str) -> None:
    weight = randn(width, dtype=torch.float32)
    x, gate = randn(MANY, width), randn(MANY, width)
    rows_are_alone(lambda x, g: run(x, g, weight, group_len, gated), x, gate)


@pytest.mark.parametrize("gap", [1, 3, 8, 16])
@pytest.mark.parametrize("width", [100, 4096])
def test_lines_that_start_elsewhere_have_the_same_bits(width: int, gap: int) -> None:
    x, weight = randn(9, width, dtype=torch.float32), randn(width)
    absent = weight.new_empty(0)
    wanted = norm(x, absent, weight, EPS, width, False)
    assert same_bits(norm(apart(x, gap), absent, weight, EPS, width, False), wanted)
    assert same_bits(norm(apart(x, gap)[3:], absent, weight, EPS, width, False), wanted[3:])


@needs_memory
def test_rows_behind_two_to_the_31() -> None:
    x = torch.ones(540_000, 4096, dtype=HALF, device=DEVICE)
    x[-1] = randn(4096)
    weight = randn(4096)
    y = norm(x, x.new_empty(0), weight, EPS, 4096, False)
    assert error(y[-1], truth(x[-1:], None, weight, 4096, False)[0]) < 5e-3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="groups of 5 channels do not divide 8"):
        norm(randn(2, 8), randn(0), randn(8), EPS, 5, False)
    with pytest.raises(ValueError, match="weight has the shape"):
        norm(randn(2, 8), randn(0), randn(9), EPS, 8, False)
