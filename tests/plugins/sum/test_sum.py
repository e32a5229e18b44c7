"""What ranks exchange: every rank gets the same bits, whoever comes first and however it is cut in pieces."""

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
from kit.ops import same_bits
from kit.rank_threads import Windows, at_once

from hemiola.plugins import OPS
from hemiola.plugins.ranks import STOP, STOPPED
from hemiola.plugins.step import STEP_OPS, forms
from hemiola.plugins.sum.reference import tree

FORMS = ["reference", "compiled"]


def sum_of(form: str) -> Callable[..., torch.Tensor]:
    return OPS["sum"].reference if form == "reference" else OPS["sum"].bind(form, ())


@pytest.mark.parametrize("room", [512, 2**16], ids=["pieces", "one piece"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_is_a_tree_over_the_ranks(form: str, size: int, room: int) -> None:
    """In fp32, of any number of lines and any width; again and again."""
    windows, run = Windows(size, room), sum_of(form)
    for seed, shape in enumerate([(1, 16), (7, 33), (12, 128), (0, 16), (3, 5)]):
        rng = torch.Generator().manual_seed(seed)
        parts = [torch.randn(shape, generator=rng) * 10**rank for rank in range(size)]
        found = at_once(windows.groups, lambda rank, group, parts=parts: run(parts[rank], group))
        for mine in found:
            assert same_bits(mine, tree(parts))


def test_a_tree_of_eight_is_a_tree_of_the_sums_of_pairs_and_fours() -> None:
    """So a sum in eight segments has the same bits whether 1, 2, 4 or 8 ranks have them."""
    parts = [*torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))]
    for each in (2, 4):
        sums = [tree(parts[at : at + each]) for at in range(0, 8, each)]
        assert same_bits(tree(sums), tree(parts))
    assert not same_bits(sum(parts[1:], parts[0]), tree(parts)), "the order shows in these numbers"


@pytest.mark.parametrize("room", [64, 2**16], ids=["pieces", "one piece"])
@pytest.mark.parametrize("form", FORMS)
def test_the_lowest_token_of_equals_wins(form: str, room: int) -> None:
    """By rank, ties, -0 and 0, and NaN, which no number beats."""
    nan, inf, width = torch.nan, torch.inf, 100
    logits = torch.tensor([
        [1.0, 5.0, 3.0, 0.0, nan, 2.0, -inf, inf],
        [2.0, 5.0, 1.0, -0.0, 9.0, nan, -inf, 7.0],
    ])  # fmt: skip
    tokens = torch.arange(16).view(2, 8)
    best = [1, 0, 0, 0, 0, 1, 0, 0]
    run = STEP_OPS["agree"].reference if form == "reference" else forms("compiled").agree
    windows = Windows(2, room)
    found = at_once(windows.groups, lambda rank, group: run(logits[rank], tokens[rank], group, width))
    for logit, token in found:
        assert token.tolist() == [int(tokens[rank, n]) + rank * width for n, rank in enumerate(best)]
        wanted = torch.stack([logits[rank, n] for n, rank in enumerate(best)])
        assert same_bits(logit.isnan(), wanted.isnan())
        assert same_bits(logit.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("form", FORMS)
def test_logits_stand_in_the_order_of_the_ranks(form: str) -> None:
    parts = [torch.randn(5, 20) for _ in range(4)]
    run = STEP_OPS["gather"].reference if form == "reference" else forms("compiled").gather
    windows = Windows(4, 192)
    for found in at_once(windows.groups, lambda rank, group: run(parts[rank], group)):
        assert same_bits(found, torch.cat(parts, 1))


@pytest.mark.parametrize("form", FORMS)
def test_who_waits_for_a_lost_rank_is_told(form: str) -> None:
    """By a word that another thread writes; nobody spins for ever."""
    windows = Windows(2)
    group = windows.groups[0]
    stop = ctypes.c_int64.from_address(int(group[STOP]))
    timer = threading.Timer(0.05, lambda: setattr(stop, "value", 1))
    timer.start()
    with pytest.raises(RuntimeError, match=STOPPED):
        sum_of(form)(torch.ones(2, 16), group)
    timer.join()


def test_a_line_that_fits_into_no_buffer_is_an_error() -> None:
    windows = Windows(2, 64)
    for form in FORMS:
        with pytest.raises(ValueError, match="a line of 128 bytes in a rank's buffer of 64"):
            sum_of(form)(torch.ones(1, 32), windows.groups[0])
