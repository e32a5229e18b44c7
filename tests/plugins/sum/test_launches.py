"""What ranks on GPUs launch is compiled, and a message of any size is cut so that windows hold it."""

import random
from collections.abc import Callable

import pytest
import torch

from hemiola.plugins import OPS
from hemiola.plugins.gpu.cover import calls_at, calls_of
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import Kernel, Values, launches
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.gpu.windows import BLOCK, LINES, PieceSizes, blocks_of, pieces_of
from hemiola.plugins.ranks import PROGRAMS, words_of
from hemiola.plugins.spec import Unsupported
from hemiola.plugins.sum.cuda import WHOLE_BYTES, sum

pytest.importorskip("triton", reason="needs Triton")
GPU = Gpu(90, 132)


def arguments(size: int, tokens: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.empty(tokens, width, dtype=dtype, device="meta")
    return [x, torch.empty(words_of(size), dtype=torch.int64, device="meta"), x]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", [8, 2688, 4096])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_sums_of_steps_of_any_size_are_compiled(size: int, width: int, dtype: torch.dtype) -> None:
    most, dice = Size(8192, 64, 4), random.Random(width)
    known = calls_of(OPS["sum"], lambda step: arguments(size, step.tokens, width, dtype), most, GPU)
    for _ in range(60):
        tokens = min(int(2 ** dice.uniform(0, 13)), most.tokens)
        assert calls_at(sum, GPU, *arguments(size, tokens, width, dtype)) <= known, tokens


def test_a_long_message_of_many_ranks_goes_in_two_passages() -> None:
    """As long as a short one is sooner there in one; two ranks send as much either way."""
    found: list[bool] = []

    def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: dict) -> None:
        found.append(constants["TWICE"])

    with launches(look):
        for size, tokens in ((2, 1), (2, 8000), (4, 1), (4, 8), (4, 9), (8, 100)):
            sum(*arguments(size, tokens, 4096, torch.bfloat16))
    assert found == [False, False, False, False, True, True]


@pytest.mark.parametrize("num_lines", [0, 1, 256, 257, 32_768, 32_769, 10**7])
@pytest.mark.parametrize(("cut", "most"), [(pieces_of, LINES), (blocks_of, BLOCK)], ids=["lines", "blocks"])
def test_a_piece_fits_its_window(cut: Callable[[int], PieceSizes], most: int, num_lines: int) -> None:
    programs, lines, warps = cut(num_lines)
    assert lines <= most and programs <= PROGRAMS and lines % (32 * warps) == 0
    assert programs * lines >= num_lines or programs == PROGRAMS
    assert (programs == 0) == (num_lines == 0)


def test_a_long_message_goes_in_blocks() -> None:
    """A short one would wait for a second passage."""
    found: list[bool] = []

    def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: dict) -> None:
        found.append(constants["WHOLE"])

    with launches(look):
        for tokens in (1, 64, WHOLE_BYTES // 8192, WHOLE_BYTES // 8192 + 1, 8000):
            sum(*arguments(2, tokens, 4096, torch.bfloat16))
    assert found == [False, False, False, True, True]


def test_tokens_that_are_no_whole_lines_are_refused() -> None:
    call = OPS["sum"].call(*arguments(2, 3, 6, torch.bfloat16)[:2])
    with pytest.raises(Unsupported, match="F is 6, 12 bytes and no multiple of 8"):
        OPS["sum"].choose(call, "cuda")
