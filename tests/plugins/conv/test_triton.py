"""conv on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import pytest
import torch
from kit.gpu_engines import MARKS
from kit.gpu_steps import DEVICE, Subject, check_errors, check_late_snapshot, halves, storm

pytestmark = MARKS


def subject(width: int = 384, taps: int = 4, chunk_len: int = 16, drafts: int = 4) -> Subject:
    fixed = torch.Generator().manual_seed(1)
    constants = [
        torch.randn(shape, generator=fixed).to(DEVICE).bfloat16() for shape in ((width, taps), width)
    ]
    sizes = {"E": width, "W": taps}
    return Subject("conv", sizes, chunk_len, lambda num: [halves(num, width)], constants, num_drafts=drafts)


SHAPES = {
    "base": {},
    "chunk 64": {"chunk_len": 64},
    "2 taps": {"taps": 2},
    "no drafts": {"drafts": 0},
    "64 drafts": {"drafts": 64},
    "width 40": {"width": 40},
}
EVERY = pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)


@EVERY
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes))


@EVERY
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    check_errors(subject(**sizes))


@pytest.mark.parametrize("drafts", [20, 64])
def test_a_late_snapshot_has_nothing_of_the_tokens_behind_it(drafts: int, poisoned_empty: None) -> None:
    check_late_snapshot(subject(drafts=drafts))
