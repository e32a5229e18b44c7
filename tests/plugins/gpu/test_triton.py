"""Ops whose kernels take every row alone, on CUDA: embed, gate, norm, rope and route.

Against their references in fp64, wherever lines lie and whatever runs beside a row.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from kit.ops import Subject, Tensors, rel_error, subject

pytest.importorskip("triton")

from tests.gpu.laws import (
    DEVICE,
    HALF,
    INTERPRETED,
    LENGTHS,
    MANY,
    apart,
    needs_memory,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
    same_bits,
)

pytestmark = on_gpu

NORMS = [(4096, 4096), (2688, 2688), (4096, 128), (4096, 512), (10240, 1280), (100, 100), (96, 24), (1, 1)]
GATED = [(False, "gate"), (True, ""), (False, "")]
ROPES = [(16, 256, 32), (4, 256, 32), (32, 128, 64), (1, 10, 3), (5, 48, 20)]


def norm(width: int, group_len: int, first: bool = False, absent: str = "") -> Subject:
    """first: the gate comes before the norm."""
    return subject("norm", 1e-5, group_len, first, W=width, absent=absent)


def rope(heads: int, depth: int, pairs: int) -> Subject:
    return subject("rope", H=heads, D=depth, M=300, R=pairs)


EMBED, GATE = subject("embed", V=50, F=40), subject("gate", "silu", E=520, J=520)
ROPE = rope(5, 48, 20)
ROUTE = subject("route", "softmax", 8, 1, 1, True, 1.0, E=256, absent="bias")
SUBJECTS = [
    *(subject("embed", V=50, F=width) for width in (1, 40, 1024, 2688)),
    *(
        subject("gate", kind, E=width, J=columns)
        for kind in ("silu", "sigmoid")
        for width in (1, 100, 520, 2048, 12288)
        for columns in {1, width}
    ),
    *(norm(*size, *gated) for size in NORMS for gated in GATED),
    *(rope(*sizes) for sizes in ROPES),
    ROUTE,
    subject("route", "sigmoid", 6, 1, 1, True, 2.5, E=128),
    subject("route", "sigmoid", 22, 8, 4, True, 5.0, E=512),
    subject("route", "sigmoid", 3, 5, 2, False, 1.5, E=30),
    subject("route", "softmax", 7, 1, 1, False, 1.0, E=7, absent="bias"),
    subject("route", "softmax", 1, 1, 1, True, 1.0, E=5),
]
LINES = [GATE, norm(100, 100), norm(4096, 4096), ROPE, ROUTE]
FAR = [subject("gate", "sigmoid", E=4096, J=4096), norm(4096, 4096, absent="gate"), rope(16, 256, 32)]
LIMITS = {"embed": 0, "gate": 5e-7, "norm": 1e-6, "rope": 3e-7, "route": 1e-6}  # of errors in fp32


def arguments(own: Subject, num_rows: int, dtype: torch.dtype = HALF) -> list[Any]:
    """As on a GPU: what comes per row is of this dtype, and so is an embedding; other weights are fp32."""
    values = own.arguments(num_rows, num_rows=1)
    for index, arg in enumerate(own.op.args):
        is_narrow = values[index].is_floating_point() and (arg.shape[0] == "T" or own.name == "embed")
        values[index] = values[index].to(DEVICE, dtype if is_narrow else None)
    return values


def per_row(own: Subject) -> list[int]:
    args = enumerate(own.op.args)
    return [index for index, arg in args if arg.shape[0] == "T" and arg.name != own.absent]


def moved(own: Subject, values: list[Any], gap: int) -> list[Any]:
    """The same numbers, with `gap` of NaN before and behind every line of floats."""
    other = list(values)
    for index in per_row(own):
        if (x := values[index]).is_floating_point():
            lines = torch.cat((x.new_full((len(x), gap), torch.nan), x.flatten(1)), 1)
            other[index] = apart(lines, gap)[:, gap:].unflatten(1, x.shape[1:])
    return other


def run(own: Subject, values: list[Any]) -> Tensors:
    results = getattr(import_module(f"hemiola.plugins.{own.name}.cuda"), own.name)(*values)
    return [results] if isinstance(results, torch.Tensor) else list(results)


def truth(own: Subject, values: list[Any]) -> Tensors:
    tensors = [value.cpu() for value in values[: len(own.op.args)]]
    wide = [value.double() if value.is_floating_point() else value for value in tensors]
    results = own.op.reference(*wide, *values[len(wide) :])
    return [results] if isinstance(results, torch.Tensor) else list(results)


# narrow scores tie where exact ones do not
BOTH = [
    (own, dtype)
    for own in SUBJECTS
    for dtype in (HALF, torch.float32)
    if HALF is not dtype or own.name != "route"
]


@pytest.mark.parametrize("own, dtype", BOTH, ids=str)
def test_against_fp64(own: Subject, dtype: torch.dtype) -> None:
    values = arguments(own, 5, dtype)
    with poisoned():
        found = run(own, moved(own, values, 16))
    wanted = truth(own, values)
    limit = LIMITS[own.name] if dtype is torch.float32 or own.name == "embed" else 5e-3
    assert found[0].dtype is dtype and rel_error(found[0], wanted[0]) <= limit
    assert all(same_bits(ids.cpu(), expected) for ids, expected in zip(found[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("own", SUBJECTS[:: 4 if INTERPRETED else 1], ids=str)
def test_a_row_is_alone(own: Subject) -> None:
    values, rows = arguments(own, 9 if INTERPRETED else MANY), per_row(own)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(rows, inputs, strict=True))
        return torch.cat(run(own, [given.get(index, value) for index, value in enumerate(values)]), -1)

    lengths = LENGTHS[:3] if INTERPRETED else LENGTHS  # a program takes a row: there is no tile to end in
    rows_are_alone(call, *(values[index] for index in rows), lengths=lengths)


@pytest.mark.parametrize("gap", [1, 3, 8, 16])
@pytest.mark.parametrize("own", LINES, ids=str)
def test_lines_that_start_elsewhere_have_the_same_bits(own: Subject, gap: int) -> None:
    values = arguments(own, 9, torch.float32)
    other, wanted = moved(own, values, gap), run(own, values)
    assert all(map(same_bits, run(own, other), wanted))
    for index in per_row(own):
        other[index] = other[index][3:]
    assert all(map(same_bits, run(own, other), (result[3:] for result in wanted)))


@pytest.mark.parametrize("own", SUBJECTS[::8], ids=str)
def test_no_rows(own: Subject) -> None:
    values = arguments(own, 0)
    assert [y.shape for y in run(own, values)] == [y.shape for y in truth(own, values)]


@needs_memory
@pytest.mark.parametrize("own", FAR, ids=str)
def test_rows_behind_two_to_the_31(own: Subject) -> None:
    last = arguments(own, 1)
    values = list(last)
    for index in per_row(own):
        values[index] = last[index].new_ones(540_000, *last[index].shape[1:])
        values[index][-1] = last[index][0]
    assert rel_error(run(own, values)[0][-1:], truth(own, last)[0]) < 5e-3


@needs_memory
def test_embeddings_behind_two_to_the_31() -> None:
    weight = torch.zeros(1_100_000, 2048, dtype=HALF, device=DEVICE)
    weight[-1] = randn(2048)
    ids = torch.tensor([1_099_999], dtype=torch.int32, device=DEVICE)
    assert same_bits(run(EMBED, [weight, ids])[0][0], weight[-1])


def test_an_id_that_is_no_row_gives_zeros() -> None:
    ids = torch.tensor([-1, 50, 7], dtype=torch.int32, device=DEVICE)
    weight = randn(50, 64)
    with poisoned():
        (y,) = run(EMBED, [weight, ids])
    assert not y[:2].any() and same_bits(y[2], weight[7])


def test_gates_far_out_are_shut_or_open() -> None:
    opening = torch.tensor([[-1e4, 1e4, -60.0, 60.0]], dtype=HALF, device=DEVICE)
    (sigmoid,), (silu,) = (run(GATE, [opening.new_ones(1, 4), opening, kind]) for kind in ("sigmoid", "silu"))
    assert sigmoid.tolist() == [[0.0, 1.0, pytest.approx(0.0), 1.0]]
    assert silu[0, 0] == 0 and silu[0, 3] == 60


@pytest.mark.parametrize("sizes", ROPES)
def test_channels_behind_the_pairs_and_place_0_do_not_turn(sizes: tuple[int, int, int]) -> None:
    x, positions, table = arguments(rope(*sizes), 5)
    table[0, 0], table[0, 1], positions[0] = 1, 0, 0
    (y,) = run(rope(*sizes), [x, positions, table])
    assert same_bits(y[:, :, 2 * sizes[2] :], x[:, :, 2 * sizes[2] :]) and same_bits(y[0], x[0])


def test_a_place_that_the_table_has_not_gives_zeros() -> None:
    x, _, table = arguments(ROPE, 3)
    positions = torch.tensor([-1, 300, 5], dtype=torch.int32, device=DEVICE)
    with poisoned():
        (y,) = run(ROPE, [x, positions, table])
    assert not y[:2].any() and y[2].all()


def chosen(scores: torch.Tensor, *attrs: object) -> Tensors:
    return run(ROUTE, [scores.to(DEVICE), torch.empty(0, device=DEVICE), *attrs])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lowest_id(scoring: str) -> None:
    scores = torch.zeros(1, 64, dtype=HALF)
    scores[0, 40:] = 1
    assert chosen(scores, scoring, 4, 1, 1, True, 1.0)[1].tolist() == [[40, 41, 42, 43]]
    assert chosen(torch.zeros_like(scores), scoring, 3, 4, 2, True, 1.0)[1].tolist() == [[0, 1, 2]]


def test_what_is_not_a_number_is_chosen_last_and_shows() -> None:
    scores = torch.randn(1, 8)
    scores[0, 2] = float("nan")
    weights, ids = chosen(scores, "sigmoid", 8, 1, 1, False, 1.0)
    assert sorted(ids[0].tolist()) == list(range(8)) and ids[0, 7] == 2 and weights[0, 7].isnan()


REFUSED = {
    "kind is 'relu'": subject("gate", "relu", E=8, J=8),
    "groups of 5 channels do not divide 8": norm(8, 5),
    "a table of 8 pairs": rope(2, 10, 8),
    "3 of the experts in 1 of 4 groups": subject("route", "sigmoid", 3, 4, 1, True, 1.0, E=8),
    "scoring is 'max'": subject("route", "max", 3, 1, 1, True, 1.0, E=8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run(REFUSED[reason], arguments(REFUSED[reason], 2))


def test_a_weight_of_another_length_is_refused() -> None:
    x, gate, weight, *attrs = arguments(norm(8, 8), 2)
    with pytest.raises(ValueError, match="weight has the shape"):
        run(norm(8, 8), [x, gate, weight[:7], *attrs])
