"""Which plan a step gets; no bit depends on it."""

import torch

from hemiola.plugins.attention.cuda import TilePlan, ahead, choose
from hemiola.plugins.gpu.device import H200, Gpu


def test_rows_beside_prompts_have_tiles_for_what_they_draft() -> None:
    """Not for as many queries as prompts have, which take twice as long for a row that decodes."""
    assert choose(2111, 64, 4, 256, False, H200, True) == TilePlan(32, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 5, 128, False, H200, True) == TilePlan(64, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 16, 128, False, H200, True) == TilePlan(64, 2, 4, 2, prompts=True)
    assert choose(2111, 64, 1, 256, False, H200, True) == TilePlan(64, 2, 4, 2)  # on average 33


def test_a_row_that_can_be_in_pieces_is_no_prompt() -> None:
    """A question of 32 tokens behind 32,000: every group of keys has a program of its own."""
    assert choose(32, 1, 4, 256, False, H200, True) == TilePlan(128, 2, 8, 1)
    assert choose(33, 1, 4, 256, False, H200, True).prompts
    beside = TilePlan(128, 2, 8, 1, prompts=True)  # and longer rows, if there are any, are prompts
    assert (
        choose(33, 2, 4, 256, False, H200, True) == beside
    )  # one token of a row that decodes, and such a question
    assert choose(64, 8, 16, 128, False, H200, True) == beside._replace(
        stages=3
    )  # seven drafts each, groups of 16


def test_other_gpus_have_no_kernel_for_prompts_alone() -> None:
    assert choose(2048, 1, 4, 256, False, H200) == TilePlan(128, 2, 8, 1)
    assert choose(2048, 1, 4, 256, False, Gpu(100, 148)) == TilePlan(64, 2, 4, 2)


def test_two_programs_of_64_queries_over_heads_of_128_fit_a_multiprocessor() -> None:
    """With three stages each took 133 KB."""
    assert choose(256, 64, 16, 128, False, H200) == TilePlan(64, 2, 4, 2)
    assert choose(256, 64, 5, 128, False, H200) == TilePlan(32, 3, 4, 2)
    assert choose(256, 64, 16, 128, True, H200) == TilePlan(64, 3, 4, 2)  # pages of e4m3


def test_what_is_told_beforehand_needs_no_descriptor() -> None:
    """TensorRT can pass none."""
    q, k, rows = torch.empty(2048, 16, 256), torch.empty(2048, 4, 256), torch.empty(1, 8)
    plans = [options["plan"] for options in ahead(H200, q, k, k, k, k, rows, rows)]
    assert plans and not any(plan.prompts for plan in plans)
