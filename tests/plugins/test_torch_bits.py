"""What the exact ops believe of torch on this CPU: where one of these fails, they cannot be exact."""

import random

import pytest
import torch

from hemiola.plugins import bits
from hemiola.plugins.bits import bmm, inverse, subtract_bmm

SHAPES = [
    (16, 64, 16),
    (16, 16, 64),
    (16, 64, 256),
    (64, 16, 64),
    (32, 64, 16),
    (8, 6, 5),
    (6, 8, 5),
    (16, 16, 16),
]
ALIGNED, SHIFTED = 0, 3  # numbers before the first one in memory


def placed(value: torch.Tensor, shift: int) -> torch.Tensor:
    memory = torch.empty(value.numel() + shift, dtype=value.dtype)
    return memory[shift:].view(value.shape).copy_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_and_cumsum_do_not_know_their_neighbours(threads: int, dtype: torch.dtype) -> None:
    """Any length, alignment and thread count: so exp is the one transcendental function that the ops use."""
    torch.set_num_threads(1)
    x = -torch.rand(1 << 18, dtype=dtype) * 20
    exp, sums = x.exp(), x.view(-1, 16).cumsum(1).view(-1)
    torch.set_num_threads(threads)
    for num in (1, 7, 31, 33, 100, 32768 + 5, 100_003, 1 << 18):
        for start in (0, 1, 8, (1 << 18) - num):
            end = min(start + num, 1 << 18)
            assert torch.equal(x[start:end].exp(), exp[start:end])
        lines = x[: num // 16 * 16].view(-1, 16)
        assert torch.equal(lines.cumsum(1).flatten(), sums[: lines.numel()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows,depth,columns", SHAPES)
def test_bmm_does_not_know_its_batch(
    rows: int, depth: int, columns: int, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch size, place in the batch, alignment, strides, threads, and whether it adds to something."""
    monkeypatch.setattr(bits, "WORK_OF_A_THREAD", 1)
    torch.set_num_threads(1)
    a, b = torch.randn(40, rows, depth, dtype=dtype), torch.randn(40, depth, columns, dtype=dtype)
    whole, added = bmm(a, b), subtract_bmm(torch.ones(40, rows, columns, dtype=dtype), a, b)
    torch.set_num_threads(threads)
    for num in (1, 2, 5, 16, 40):
        for start in (0, 40 - num):
            some = slice(start, start + num)
            for shift in (ALIGNED, SHIFTED):
                left, right = placed(a[some], shift), placed(b[some], shift)
                assert torch.equal(bmm(left, right), whole[some])
                ones = torch.ones(num, rows, columns, dtype=dtype)
                assert torch.equal(subtract_bmm(ones, left, right), added[some])
            every_second = torch.stack([a[some], a[some]], 1)[:, 0]
            assert torch.equal(bmm(every_second, b[some]), whole[some])


@pytest.mark.parametrize("chunk_len", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_a_triangular_inverse_reads_rows_above_it(
    chunk_len: int, threads: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(1)
    A = (torch.rand(40, chunk_len, chunk_len, dtype=dtype) - 0.3).tril(-1)

    whole = inverse(A)
    torch.set_num_threads(threads)
    rng = random.Random(0)
    for num in (1, 2, 7, 40):
        known = rng.randrange(1, chunk_len)
        later = A[-num:].clone()
        later[:, known:] = (torch.randn_like(later[:, known:]) * 3).tril(known - 1)
        assert torch.equal(inverse(later)[:, :known], whole[-num:, :known])
