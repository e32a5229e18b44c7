"""Rotary positions on CUDA."""

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.rope.cuda import rope
from tests.gpu.laws import (
    DEVICE,
    HALF,
    MANY,
    error,
    needs_memory,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
    same_bits,
)

pytestmark = on_gpu


def table(num_places: int, pairs: int) -> torch.Tensor:
    angles = torch.arange(num_places).double()[:, None] * 1e4 ** -(torch.arange(pairs).double() / pairs)
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(DEVICE)


def truth(x: torch.Tensor, positions: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = turns.shape[2]
    cos, sin = turns[positions.long()].double().unbind(1)
    a, b, rest = x.double().split([pairs, pairs, x.shape[2] - 2 * pairs], dim=2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), 2)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize(
    "heads, depth, pairs", [(16, 256, 32), (4, 256, 32), (32, 128, 64), (1, 10, 3), (5, 48, 20)]
)
def test_against_fp64(heads: int, depth: int, pairs: int, dtype: torch.dtype) -> None:
    turns = table(300, pairs)
    positions = torch.tensor([0, 299, 7, 8, 9], dtype=torch.int32, device=DEVICE)
    wide = randn(5, heads + 2, depth, dtype=dtype)
    x = wide[:, 1:-1]  # heads of a wider product
    with poisoned():
        y = rope(x, positions, turns)
    assert error(y, truth(x, positions, turns)) < (3e-7 if dtype is torch.float32 else 5e-3)
    assert same_bits(y[:, :, 2 * pairs :], x[:, :, 2 * pairs :])
    assert same_bits(y[0], x[0])


def test_a_row_is_alone() -> None:
    turns = table(4000, 32)
    positions = torch.randperm(4000, device=DEVICE)[:MANY].int()
    rows_are_alone(lambda x, p: rope(x, p, turns), randn(MANY, 4, 96), positions)


def test_a_place_that_the_table_has_not_gives_zeros() -> None:
    positions = torch.tensor([-1, 300, 5], dtype=torch.int32, device=DEVICE)
    with poisoned():
        y = rope(randn(3, 2, 20), positions, table(300, 8))
    assert not y[:2].any() and y[2].all()


@needs_memory
def test_rows_behind_two_to_the_31() -> None:
    x = torch.ones(540_000, 16, 256, dtype=HALF, device=DEVICE)
    x[-1] = randn(16, 256)
    positions = torch.full((len(x),), 11, dtype=torch.int32, device=DEVICE)
    turns = table(12, 32)
    assert error(rope(x, positions, turns)[-1], truth(x[-1:], positions[-1:], turns)[0]) < 5e-3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a table of 8 pairs"):
        rope(randn(1, 2, 10), torch.zeros(1, dtype=torch.int32, device=DEVICE), table(3, 8))
