"""Embedding rows on CUDA."""

import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.embed.cuda import embed
from tests.gpu.laws import DEVICE, HALF, needs_memory, on_gpu, poisoned, randn, same_bits

pytestmark = on_gpu


@pytest.mark.parametrize("width", [1, 40, 1024, 2688])
def test_rows_of_the_table(width: int) -> None:
    weight = randn(50, width)
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=DEVICE)
    with poisoned():
        assert same_bits(embed(weight, ids), weight[ids.long()])


def test_an_id_that_is_no_row_gives_zeros() -> None:
    ids = torch.tensor([-1, 50, 7], dtype=torch.int32, device=DEVICE)
    weight = randn(50, 64)
    with poisoned():
        y = embed(weight, ids)
    assert not y[:2].any() and same_bits(y[2], weight[7])


@needs_memory
def test_rows_behind_two_to_the_31() -> None:
    weight = torch.zeros(1_100_000, 2048, dtype=HALF, device=DEVICE)
    weight[-1] = randn(2048)
    ids = torch.tensor([1_099_999], dtype=torch.int32, device=DEVICE)
    assert same_bits(embed(weight, ids)[0], weight[-1])


def test_no_tokens() -> None:
    assert embed(randn(5, 8), torch.empty(0, dtype=torch.int32, device=DEVICE)).shape == (0, 8)
