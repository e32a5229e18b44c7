"""What ranks exchange on GPUs, interpreted: the references' bits, by either way, in any number of pieces."""

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from kit.ops import same_bits

from hemiola.plugins.gpu import windows
from hemiola.plugins.gpu.windows import PieceSizes
from hemiola.plugins.step import forms
from hemiola.plugins.sum.reference import tree

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from kit.rank_processes import SharedWindows

from hemiola.plugins.step.agree import cuda as agree
from hemiola.plugins.step.gather import cuda as gather
from hemiola.plugins.sum import cuda

SHAPES = [(1, 16), (7, 64), (0, 16), (3, 40)]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 lines, by three programs."""

    def short(num_lines: int) -> PieceSizes:
        return PieceSizes(min(3, -(-num_lines // 16)), 16, 1)

    for module in (windows, cuda, agree, gather):
        monkeypatch.setattr(module, "pieces_of", short)
    for module in (windows, cuda):
        monkeypatch.setattr(module, "blocks_of", short)


def parts_of(size: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=rng) * 3.0**rank).to(dtype) for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gpu_s_sum_is_the_reference_s_tree(size: int, twice: bool, dtype: torch.dtype) -> None:
    """Also where a step has more pieces than programs, and steps of all sizes follow each other, in lines
    and in blocks."""
    steps = [parts_of(size, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]

    def run(rank: int, group: torch.Tensor) -> list[torch.Tensor]:
        ways = [False, True, True, False] * 2
        return [
            cuda.sum(parts[rank], group, twice=twice, whole=whole)
            for parts, whole in zip(steps * 2, ways, strict=True)
        ]

    for found in SharedWindows(size).run(run):
        for mine, parts in zip(found, steps * 2, strict=True):
            assert same_bits(mine, tree([part.float() for part in parts]).to(dtype))


@pytest.mark.parametrize("whole", [False, True], ids=["lines", "blocks"])
@pytest.mark.parametrize(("size", "twice"), [(2, False), (8, True)], ids=["2, once", "8, twice"])
def test_a_residual_is_added_before_a_gpu_rounds(size: int, twice: bool, whole: bool) -> None:
    parts = parts_of(size, (7, 40), torch.bfloat16, 0)
    residual = parts_of(1, (7, 40), torch.bfloat16, 1)[0]
    run = partial(cuda.sum, residual=residual, twice=twice, whole=whole)
    for found in SharedWindows(size).run(lambda rank, group: run(parts[rank], group)):
        assert same_bits(found, (tree([part.float() for part in parts]) + residual.float()).bfloat16())


@pytest.mark.parametrize("whole", [False, True], ids=["lines", "blocks"])
def test_numbers_of_pieces_wrap_around(whole: bool) -> None:
    parts, shared = parts_of(2, (9, 32), torch.bfloat16, 0), SharedWindows(2)
    for group in shared.groups:
        group[-128:] = 2**32 - 3
    found = shared.run(lambda rank, group: [cuda.sum(parts[rank], group, whole=whole) for _ in range(4)])
    wanted = (parts[0].float() + parts[1].float()).bfloat16()
    assert all(same_bits(mine, wanted) for own in found for mine in own)


def test_a_gpu_s_lowest_token_of_equals_wins() -> None:
    """By rank, ties, -0 and 0, and NaN, which no number beats."""
    nan, inf, width = torch.nan, torch.inf, 100
    logits = torch.tensor([
        [1.0, 5.0, 3.0, 0.0, nan, 2.0, -inf, inf] * 5,
        [2.0, 5.0, 1.0, -0.0, 9.0, nan, -inf, 7.0] * 5,
        [2.0, 4.0, 1.0, -0.0, 9.0, 3.0, -inf, inf] * 5,
        [0.0, 4.0, 7.0, -0.0, nan, 3.0, -1.0, inf] * 5,
    ])  # fmt: skip
    tokens, op = torch.arange(160).view(4, 40) % 100, forms("cuda").agree
    best = [1, 0, 3, 0, 0, 1, 3, 0] * 5
    for logit, token in SharedWindows(4).run(
        lambda rank, group: op(logits[rank], tokens[rank], group, width)
    ):
        assert token.tolist() == [int(tokens[rank, n]) + rank * width for n, rank in enumerate(best)]
        wanted = torch.stack([logits[rank, n] for n, rank in enumerate(best)])
        assert same_bits(logit.isnan(), wanted.isnan())
        assert same_bits(logit.nan_to_num(), wanted.nan_to_num())


def test_a_gpu_s_logits_stand_in_the_order_of_the_ranks() -> None:
    parts, op = [torch.randn(5, 20) for _ in range(4)], forms("cuda").gather
    for found in SharedWindows(4).run(lambda rank, group: op(parts[rank], group)):
        assert same_bits(found, torch.cat(parts, 1))


@pytest.mark.parametrize("whole", [False, True], ids=["lines", "blocks"])
def test_a_kernel_that_waits_for_a_lost_rank_ends(whole: bool) -> None:
    """By a word that another process writes; nobody spins for ever."""
    shared = SharedWindows(2)

    def run(rank: int, group: torch.Tensor) -> Any:
        return None if rank else cuda.sum(torch.ones(2, 16), group, whole=whole) is not None

    timer = threading.Timer(0.5, lambda: setattr(shared.stop, "value", 1))
    timer.start()
    assert shared.run(run) == [True, None]
    timer.join()
