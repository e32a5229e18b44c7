"""conv on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import pytest
import torch
from kit.gpu_engines import MARKS
from kit.gpu_steps import DEVICE, Subject, check_errors, halves, plain_run, rows_of, same_bits, storm

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


@pytest.mark.parametrize("num", [30, 5], ids="{} tokens".format)
def test_a_sequence_goes_on_from_a_snapshot(num: int) -> None:
    torch.manual_seed(0)
    it = subject()
    tokens = it.make_tokens(60)
    plain = plain_run(it, tokens)
    slots = it.make_slots(3)
    before = 30 - num
    if before:
        it.call([t[:before] for t in tokens], slots, rows_of((0, before, 0, 1, 0, 0, 0, 0), device=DEVICE))
    edge = before // 16 * 16
    snapshot = rows_of((0, num + 4, 0, 1, before, edge, 2, 32), device=DEVICE)
    it.call([t[before:34] for t in tokens], slots, snapshot)
    y = it.call([t[32:] for t in tokens], slots, rows_of((0, 28, 0, 2, 32, 32, 0, 0), device=DEVICE))
    same_bits(y, plain.outputs[32:], "outputs behind the snapshot")
