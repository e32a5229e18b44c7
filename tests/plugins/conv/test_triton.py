"""conv on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import random
from dataclasses import replace

import pytest
import torch
from kit.gpu_steps import (
    DEVICE,
    Subject,
    check_errors,
    check_late_snapshot,
    check_tiles,
    halves,
    rows_of,
    same_bits,
    storm,
)
from kit.ops import rel_error

from hemiola.plugins.conv.reference import conv as reference
from tests.gpu.laws import INTERPRETED, on_gpu

pytestmark = on_gpu
slow = pytest.mark.skipif(INTERPRETED, reason="whole runs take minutes in the interpreter")


def subject(
    width: int = 384,
    taps: int = 4,
    chunk_len: int = 16,
    drafts: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    fixed = torch.Generator().manual_seed(1)
    constants = [torch.randn(shape, generator=fixed).to(DEVICE, dtype) for shape in ((width, taps), width)]
    sizes = {"E": width, "W": taps}

    def make_tokens(num: int) -> list[torch.Tensor]:
        return [halves(num, width, dtype)]

    return Subject("conv", sizes, chunk_len, make_tokens, constants, num_drafts=drafts, dtype=dtype)


SHAPES = {
    "base": {},
    "chunk 64": {"chunk_len": 64},
    "2 taps": {"taps": 2},
    "3 taps": {"taps": 3},
    "no drafts": {"drafts": 0},
    "64 drafts": {"drafts": 64},
    "width 40": {"width": 40},
}
FP32 = {"fp32": {"dtype": torch.float32}}
EVERY = pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
PLANS = [(1, 64), (2, 512), (8, 128), (16, 256)]


@slow
@pytest.mark.parametrize("sizes", (SHAPES | FP32).values(), ids=SHAPES | FP32)
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes))


@slow
@EVERY
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    check_errors(subject(**sizes))


@slow
def test_fp32_errs_no_more_than_sums_in_another_order() -> None:
    check_errors(subject(dtype=torch.float32), 1e-6)


@slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("taps", [4, 3])
def test_tiles_leave_the_bits_alone(plan: tuple[int, int], taps: int) -> None:
    check_tiles(subject(taps=taps), plan)


def by_reference(
    it: Subject, x: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and columns in fp32."""
    weight, bias = (constant.float() for constant in it.constants)
    after = columns.float()
    return reference(x.float(), weight, bias, after, rows.cpu(), it.chunk_len), after


def step(rng: random.Random, chunk_len: int, drafts: int) -> tuple[list[tuple[int, ...]], int]:
    """Rows in any order, with gaps and tokens of nobody between them, and how many tokens there are."""
    rows, t, slots = [], rng.choice((0, 2)), rng.sample(range(1, 12), 10)
    for _ in range(rng.randint(1, 5)):
        num, edge = rng.randint(1, drafts + 1), rng.randint(0, 3) * chunk_len
        committed, guessed = edge + rng.randint(0, chunk_len + drafts), rng.randint(0, num - 1)
        if rng.random() < 0.4:
            num, guessed = rng.randint(1, 4 * chunk_len), 0
        if rng.random() < 0.2:
            rows.append((t, num, 0, 0, 0, 0, 0, 0))
        else:
            edges = range(edge + chunk_len, committed + num - guessed + 1, chunk_len)
            taken = (slots.pop(), rng.choice(edges)) if edges and rng.random() < 0.7 else (0, 0)
            rows.append((t, num, guessed, slots.pop(), committed, edge, *taken))
        t += num + rng.choice((0, 0, 1))
    return rng.sample(rows, len(rows)), t + rng.choice((0, 0, 3))


@pytest.mark.parametrize("seed", range(12 if INTERPRETED else 200))
def test_every_plan_does_what_the_reference_does(seed: int, poisoned_empty: None) -> None:
    rng = random.Random(seed)
    it = subject(
        taps=rng.choice((4, 4, 3, 2)),
        width=48 if INTERPRETED else rng.choice((48, 384)),
        chunk_len=8 if INTERPRETED else 16,
        drafts=rng.choice((4, 10) if INTERPRETED else (4, 20)),
    )
    rows, num_tokens = step(rng, it.chunk_len, it.num_drafts)
    (x,), (before,), on_device = it.tokens(num_tokens, seed), it.make_slots(12), rows_of(*rows, device=DEVICE)
    wanted, columns = by_reference(it, x, before.normal_(), on_device)
    outputs = []
    for plan in PLANS[:: 3 if INTERPRETED else 1]:
        after = before.clone()
        outputs.append(replace(it, plan=plan).call([x], [after], on_device))
        same_bits(after.float(), columns, f"columns of {plan}, {rows}")
        same_bits(outputs[-1], outputs[0], f"outputs of {plan}, {rows}")
    assert rel_error(outputs[0], wanted) < 1e-2


@slow
@pytest.mark.parametrize("drafts", [20, 64])
def test_a_late_snapshot_has_nothing_of_the_tokens_behind_it(drafts: int, poisoned_empty: None) -> None:
    check_late_snapshot(subject(drafts=drafts))
