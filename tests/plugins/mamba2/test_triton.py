"""mamba2 on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import random

import pytest
import torch
from kit.gpu_engines import MARKS
from kit.gpu_steps import (
    DEVICE,
    Subject,
    check_errors,
    check_last_slot,
    check_late_snapshot,
    check_tiles,
    halves,
    rows_of,
    same_bits,
    storm,
)

pytestmark = MARKS
DT = (0.001, 4.0)


def subject(
    heads: int = 4,
    width: int = 64,
    groups: int = 2,
    depth: int = 128,
    chunk_len: int = 32,
    drafts: int = 4,
    strong: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    fixed = torch.Generator().manual_seed(1)
    dt_bias, D = (torch.randn(heads, generator=fixed).to(DEVICE) - 2 for _ in range(2))
    A = (-torch.rand(heads, generator=fixed) * 4 * strong - 0.1).to(DEVICE)

    def make_tokens(num: int) -> list[torch.Tensor]:
        wide = halves(num, heads * width + 2 * groups * depth, dtype)
        x, B, C = wide.split([heads * width, groups * depth, groups * depth], 1)
        B, C = (part.unflatten(1, (groups, depth)) / depth**0.25 for part in (B, C))
        return [x.unflatten(1, (heads, width)), B, C, torch.randn(num, heads, device=DEVICE)]

    sizes = {"H": heads, "P": width, "G": groups, "D": depth}
    return Subject("mamba2", sizes, chunk_len, make_tokens, [dt_bias, A, D], DT, drafts, dtype=dtype)


SHAPES = {
    "base": {},
    "chunk 16": {"chunk_len": 16},
    "width 80": {"width": 80},
    "depth 16": {"depth": 16, "width": 16},
    "depth 256": {"depth": 256},
    "one group": {"groups": 1},
    "no drafts": {"drafts": 0},
    "64 drafts": {"drafts": 64},
    "strong decay": {"strong": 30.0},
}
FP32 = {
    "fp32": {"dtype": torch.float32},
    "fp32, chunk 16": {"dtype": torch.float32, "chunk_len": 16, "width": 80},
}
EVERY = pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
PLANS = [
    (16, 1, 3, 2, 1, 16, 1, 1, 3),
    (32, 2, 2, 1, 2, 64, 3, 2, 500),
    (64, 1, 1, 3, 4, 32, 2, 4, 1),
    (64, 2, 3, 2, 4, 64, 2, 4, 264),
]


@pytest.mark.parametrize("sizes", (SHAPES | FP32).values(), ids=SHAPES | FP32)
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes))


@EVERY
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    check_errors(subject(**sizes), state=1e-4)


@pytest.mark.parametrize("sizes", FP32.values(), ids=FP32)
def test_fp32_errs_no_more_than_sums_in_another_order(sizes: dict) -> None:
    check_errors(subject(**sizes), 3e-6, 3e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_tiles_leave_the_bits_alone(plan: tuple[int, ...]) -> None:
    check_tiles(subject(), plan)


def test_a_slot_beyond_2_to_the_31_bytes() -> None:
    check_last_slot(subject(heads=64, groups=8), 64 * 64 * 128)


@pytest.mark.parametrize("drafts", [20, 64])
def test_a_late_snapshot_has_nothing_of_the_tokens_behind_it(drafts: int, poisoned_empty: None) -> None:
    check_late_snapshot(subject(chunk_len=16, drafts=drafts))


def test_a_row_among_150_has_the_bits_it_has_among_10(poisoned_empty: None) -> None:
    it, rng = subject(width=16, depth=16, chunk_len=16, drafts=3), random.Random(0)
    edges = [rng.randint(1, 4) * 16 for _ in range(150)]
    rows = [(4 * n, 4, 3, n + 1, edge + rng.randrange(19), edge, 0, 0) for n, edge in enumerate(edges)]
    tokens = it.tokens(600, seed=0)
    slots = [torch.rand(t.shape, device=DEVICE).to(t.dtype) for t in it.make_slots(151)]
    few = [t.clone() for t in slots]
    y = it.call(tokens, slots, rows_of(*rows, device=DEVICE))
    for n in range(0, 150, 10):
        some = rows_of(*[(4 * i, *row[1:]) for i, row in enumerate(rows[n : n + 10])], device=DEVICE)
        own = it.call([t[4 * n : 4 * n + 40] for t in tokens], few, some)
        same_bits(own, y[4 * n : 4 * n + 40], f"outputs from row {n} on")
    for one, other in zip(slots, few, strict=True):
        same_bits(one[1:], other[1:], "slots")
