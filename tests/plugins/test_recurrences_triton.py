"""Recurrences on CUDA: the bits of the plain run however steps are cut, and the truth in fp64.

A row of each table is an op and sizes of `<op>/on_gpu.py`, which says how its calls are made."""

import random
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.gpu_engines import MARKS
from kit.gpu_steps import (
    DEVICE,
    check_errors,
    check_last_slot,
    check_late_snapshot,
    check_tiles,
    rows_of,
    same_bits,
    storm,
)

pytestmark = MARKS
OPS = {
    path.parent.name: import_module(f"tests.plugins.{path.parent.name}.on_gpu")
    for path in sorted(Path(__file__).parent.glob("*/on_gpu.py"))
}


def each(*tables: str) -> list[Any]:
    """A row for each op and sizes of these tables."""
    return [
        pytest.param(op, sizes, id=f"{op}, {name}")
        for op, own in OPS.items()
        for table in tables
        for name, sizes in getattr(own, table).items()
    ]


def plans() -> Iterable[Any]:
    for op, own in OPS.items():
        for sizes, tiles in own.PLANS:
            yield pytest.param(op, sizes, tiles, id=f"{op}, {sizes}, {tiles}")


@pytest.mark.parametrize(("op", "sizes"), each("SHAPES", "FP32"))
def test_every_cut_has_the_plain_bits(op: str, sizes: dict, poisoned_empty: None) -> None:
    storm(OPS[op].subject(**sizes))


@pytest.mark.parametrize(("op", "sizes"), each("SHAPES"))
def test_errs_no_more_than_bf16_outputs(op: str, sizes: dict) -> None:
    check_errors(OPS[op].subject(**sizes), state=OPS[op].STATE_ERROR)


@pytest.mark.parametrize(("op", "sizes"), each("FP32"))
def test_fp32_errs_no_more_than_sums_in_another_order(op: str, sizes: dict) -> None:
    check_errors(OPS[op].subject(**sizes), 3e-6, 3e-6)


@pytest.mark.parametrize(("op", "sizes", "tiles"), list(plans()))
def test_tiles_leave_the_bits_alone(
    op: str, sizes: dict, tiles: tuple[int, ...], poisoned_empty: None
) -> None:
    check_tiles(OPS[op].subject(**sizes), tiles)


@pytest.mark.parametrize("op", OPS)
def test_a_slot_beyond_2_to_the_31_numbers(op: str) -> None:
    sizes, numbers = OPS[op].LARGE
    check_last_slot(OPS[op].subject(**sizes), numbers)


@pytest.mark.parametrize("drafts", [20, 64])
@pytest.mark.parametrize("op", OPS)
def test_a_late_snapshot_has_nothing_of_the_tokens_behind_it(
    op: str, drafts: int, poisoned_empty: None
) -> None:
    check_late_snapshot(OPS[op].subject(**OPS[op].LATE, drafts=drafts))


def test_a_row_among_150_has_the_bits_it_has_among_10(poisoned_empty: None) -> None:
    it = OPS["mamba2"].subject(width=16, depth=16, chunk_len=16, drafts=3)
    rng = random.Random(0)
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
