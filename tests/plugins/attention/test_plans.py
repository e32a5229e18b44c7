"""Which plan a step gets; no bit depends on it."""

import pytest
import torch

from hemiola.plugins.attention.cuda import TilePlan, ahead, choose
from hemiola.plugins.gpu.device import H200, Gpu


def test_rows_beside_prompts_have_tiles_for_what_they_draft() -> None:
    """Not for as many queries as prompts have, which take twice as long for a row that decodes."""
    assert choose(2111, 64, 4, 256, 0, H200, True) == TilePlan(32, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 5, 128, 0, H200, True) == TilePlan(64, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 16, 128, 0, H200, True) == TilePlan(64, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 1, 256, 0, H200, True) == TilePlan(64, 2, 4, 2)  # on average 33


def test_a_row_that_can_be_in_pieces_is_no_prompt() -> None:
    """A question of 32 tokens behind 32,000: every group of keys has a program of its own."""
    assert choose(32, 1, 4, 256, 0, H200, True) == TilePlan(128, 2, 8, 1)
    assert choose(33, 1, 4, 256, 0, H200, True).prompts
    beside = TilePlan(128, 2, 8, 1, prompts=True)  # and longer rows, if there are any, are prompts
    assert (
        choose(33, 2, 4, 256, 0, H200, True) == beside
    )  # one token of a row that decodes, and such a question
    assert choose(64, 8, 16, 128, 0, H200, True) == beside._replace(
        stages=3
    )  # seven drafts each, groups of 16


def test_other_gpus_have_no_kernel_for_prompts_alone() -> None:
    assert choose(2048, 1, 4, 256, 0, H200) == TilePlan(128, 2, 8, 1)
    assert choose(2048, 1, 4, 256, 0, Gpu(100, 148)) == TilePlan(64, 2, 4, 2)


def test_two_programs_of_64_queries_over_heads_of_128_fit_a_multiprocessor() -> None:
    """With three stages each took 133 KB."""
    assert choose(256, 64, 16, 128, 0, H200) == TilePlan(64, 2, 4, 2)
    assert choose(256, 64, 5, 128, 0, H200) == TilePlan(32, 3, 4, 2)
    assert choose(256, 64, 16, 128, 8, H200) == TilePlan(64, 3, 4, 2)  # pages of e4m3


@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("per_group", [1, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_tiles_over_narrow_pages_are_all_below_64_queries_or_none_is(
    bits: int, per_group: int, depth: int
) -> None:
    """From 64 on products are added in another order: a row's bits would depend on its step's tokens."""
    sizes = [(tokens * rows, rows) for tokens in (1, 2, 4, 8, 30, 500) for rows in (1, 2, 7, 64)]
    queries = {choose(*size, per_group, depth, bits, H200, True).queries for size in sizes}
    assert max(queries) < 64 or min(queries) >= 64
    assert bits != 3 or max(queries) < 64, "Triton does not compile them"


@pytest.mark.parametrize("bits", [3, 4])
def test_pages_of_codes_have_more_tiles_on_their_way(bits: int) -> None:
    """As many as leave room for a second program: else a tile took as long as one of bf16."""
    assert choose(64, 64, 4, 256, bits, H200) == TilePlan(16, 3, 4, 2)
    assert choose(64, 64, 4, 128, bits, H200) == TilePlan(16, 5, 4, 2)
    assert choose(1, 1, 4, 256, bits, H200) == TilePlan(16, 5, 4, 1)
    assert choose(64, 64, 4, 256, bits, Gpu(89, 142)) == TilePlan(16, 2, 4, 2)


def test_what_is_told_beforehand_needs_no_descriptor() -> None:
    """TensorRT can pass none."""
    q, k, rows = torch.empty(2048, 16, 256), torch.empty(2048, 4, 256), torch.empty(1, 8)
    plans = [options["plan"] for options in ahead(H200, q, k, k, k, k, rows, rows)]
    assert plans and not any(plan.prompts for plan in plans)
