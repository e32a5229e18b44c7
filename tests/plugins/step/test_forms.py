"""The ops around a step's trunk, in every form, are their references: results, ledger, rings, answers, and
nothing else is written."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from kit import step_plans
from kit.ops import same_bits
from kit.redzones import given
from kit.step_plans import CHUNK, Shape, Step

from hemiola.plugins.step import STEP_OPS
from hemiola.plugins.step.plan import ANSWERS, BROKEN, COLUMNS, DRAFTS, TOTAL, PlanFields

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
Same = Callable[[torch.Tensor, torch.Tensor], bool]
pytestmark = pytest.mark.usefixtures("poisoned_empty")

SHAPES = (
    Shape(),
    Shape(num_padding=0, spare=0, kinds=("decode",)),
    Shape(1, 0, 0, kinds=("decode",), most=1),
    Shape(1, 3, 5, kinds=("end",)),
    Shape(3, 1, 2, kinds=("part",)),
    Shape(4, 2, with_head=0.0),
    Shape(0, 4, 0),
    Shape(6, 2, most=8, num_features=40, dtype=torch.bfloat16),
)
LARGE = (
    Shape(150, 9, 70, longest=3, num_features=8),  # more rows than a kernel reads at once
    Shape(2, 1, 9, longest=200, kinds=("part", "end"), num_features=600, dtype=torch.bfloat16),
)
VAST = (
    Shape(1000, 24, 300, longest=12, num_features=1024, dtype=torch.bfloat16),
    Shape(3, 1, 100, longest=4000, kinds=("part", "end", "decode"), num_features=2048, dtype=torch.bfloat16),
)


@pytest.fixture(params=["compiled", "cuda"])
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled" and INTERPRETED:
        pytest.skip("runs without TRITON_INTERPRET=1")
    if request.param == "cuda" and not (ON_GPU or INTERPRETED):
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    if request.param == "cuda":
        pytest.importorskip("triton")
    return request.param


def on_device(form: str, value: Any) -> Any:
    """A copy, where the form runs."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cuda" if form == "cuda" and ON_GPU else "cpu", copy=True)


def function_of(form: str, op: str) -> Callable[..., Any]:
    if form == "reference":
        return STEP_OPS[op].reference
    if find_spec(f"hemiola.plugins.step.{op}.{form}") is None:
        pytest.skip(f"step.{op} has no form {form}")
    return STEP_OPS[op].bind(form, ())


def as_here(form: str, shape: Shape) -> Shape:
    """On CPUs states are fp32."""
    return shape if form == "cuda" else replace(shape, dtype=torch.float32)


def listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results or ())


def compare(form: str, op: str, *values: Any, same: Same = same_bits) -> Any:
    """The form does with copies what the reference does with the values, whose results come back. `same` is
    asked of arguments that are changed."""
    spec, run = STEP_OPS[op], function_of(form, op)
    spec.check(*values)
    mine = [on_device(form, value) for value in values]
    changed = [arg.mutated for arg in spec.args]
    with given(mine, changed) if form == "compiled" else nullcontext(mine) as around:
        found = listed(run(*around))
    results = spec.reference(*values)
    for number, (ours, theirs) in enumerate(zip(found, listed(results), strict=True)):
        assert ours.dtype is theirs.dtype, f"{op}'s result {number}"
        assert same_bits(ours.cpu(), theirs), f"{op}'s result {number}: {ours.cpu()}, not {theirs}"
    for arg, ours, theirs in zip(spec.args, mine, values, strict=False):
        is_same = same if arg.mutated else same_bits
        assert is_same(ours.cpu(), theirs), f"{op} leaves in {arg.name}: {ours.cpu()}, not {theirs}"
    return results


def answers_of(step: Step, columns: Callable[[int], Sequence[slice]]) -> Same:
    """Equal where a row has lines: in these columns, given how many."""

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        if theirs.shape != step.answers.shape or theirs.data_ptr() != step.answers.data_ptr():
            return same_bits(ours, theirs)
        with_lines = [(n, num) for n in range(len(theirs)) if (num := step.num_lines_of(n))]
        return all(
            same_bits(ours[n, part], theirs[n, part]) for n, num in with_lines for part in columns(num)
        )

    return same


def walk(form: str, step: Step) -> None:
    """A step with a drafting head, from its first op to its last, each beside the reference."""
    plan, lengths, ids, width, most = step.plan, step.lengths, step.ids, step.width, step.shape.most
    compare(form, "change", step.changes, step.table)
    rows, *_ = compare(form, "fill", plan, step.table, lengths, ids, step.num("token"), step.num("line"))
    said = answers_of(step, lambda num: (slice(num), slice(width, width + BROKEN + 1)))
    accepted = (plan, step.chosen, step.logit, lengths, ids, step.answers, width, CHUNK)
    compare(form, "accept", *accepted, same=said)
    for min_n, max_n in ((1, 2), (2, 5)):
        compare(form, "look_up", plan, lengths.clone(), ids.clone(), min_n, max_n)
    sizes = step.num("pair"), step.num("draft")
    compare(form, "first_pairs", plan, rows, step.hidden, step.ring, lengths, ids, *sizes)
    compare(form, "keep", rows, lengths, step.hidden, step.ring)
    for number, chosen in enumerate(step.drafted):
        compare(form, "write", plan, chosen, lengths, ids, number)
        compare(form, "next_pairs", plan, lengths, ids, number + 1, sizes[1])
    told = answers_of(step, lambda num: (slice(width + BROKEN + 1, width + ANSWERS + most),))
    compare(form, "tell", plan, lengths, ids, step.answers, width, most, same=told)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_op_of_a_step_is_its_reference(form: str, shape: Shape, seed: int) -> None:
    walk(form, step_plans.make(seed, as_here(form, shape)))


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_steps_of_many_rows_and_long_ones(form: str, shape: Shape) -> None:
    walk(form, step_plans.make(7, as_here(form, shape)))


@pytest.mark.parametrize("shape", VAST, ids=str)
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_steps_as_large_as_a_gpu_has_them(shape: Shape) -> None:
    walk("cuda", step_plans.make(8, shape))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("seed", range(2))
def test_no_kernel_counts_on_the_order_of_its_programs(order: None, seed: int) -> None:
    walk("cuda", step_plans.make(seed, Shape()))


def test_the_random_plans_have_all_that_they_promise() -> None:
    """Else a test above could be green for nothing."""
    seen = set()
    for seed in range(4):
        step = step_plans.make(seed, Shape())
        lengths, ids = step.lengths.clone(), step.ids.clone()
        sizes = step.num("token"), step.num("line")
        rows, *_ = STEP_OPS["fill"].reference(step.plan, step.table, lengths, ids, *sizes)
        answers = step.answers.clone()
        STEP_OPS["accept"].reference(
            step.plan, step.chosen, step.logit, lengths, ids, answers, step.width, CHUNK
        )
        for n, (row, after) in enumerate(pairwise(PlanFields(*line) for line in step.plan.tolist())):
            accepted, judged, broken = answers[n, step.width : step.width + 3].tolist()
            last, start, edge = row.snapshot_edge - 1, int(rows[n, 4]), int(rows[n, 5])
            passes = row.snapshot_slot > 0 and edge <= last < int(lengths[2, row.slot])
            seen |= {
                "padding" if row.slot == 0 else "row",
                "no line" if row.line == after.line else f"{broken} broken",
                f"owes {row.owed > 0}" if row.pair < after.pair else "no pair",
                f"drafts {row.room}" if row.draft < after.draft else "no drafts",
                "all accepted" if 0 < accepted == judged else "rejected" if accepted < judged else "",
                "fewer to judge" if 0 <= judged < row.num_drafts else "",
                f"snapshot of the {'ring' if last < start else 'step'}" if passes else "",
            }
    wanted = "padding, row, no line, 0 broken, 1 broken, owes True, owes False, no pair, drafts 1, drafts 3"
    wanted += ", no drafts, all accepted, rejected, fewer to judge, snapshot of the ring"
    wanted += ", snapshot of the step"
    assert seen >= set(wanted.split(", "))


def text_step(*texts: list[int], room: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A plan whose rows have these texts and room; lengths and ids."""
    plan = torch.zeros(len(texts) + 1, len(COLUMNS), dtype=torch.int32)
    plan[:-1, COLUMNS.index("slot")] = torch.arange(1, len(texts) + 1)
    plan[:-1, COLUMNS.index("room")] = room
    lengths = torch.full((4, len(texts) + 1), 9)
    ids = torch.full((len(texts) + 1, max(map(len, texts)) + room + 1), 5, dtype=torch.int32)
    lengths[:, 0], ids[0] = 0, 0
    for slot, text in enumerate(texts, 1):
        lengths[TOTAL, slot], ids[slot, : len(text)] = len(text), torch.tensor(text, dtype=torch.int32)
    return plan, lengths, ids


TEXTS = {
    "one id": ([4], 1, 3, None),
    "two that differ": ([4, 6], 1, 3, None),
    "two of a kind": ([4, 4], 1, 3, [4, 4, 4, 4]),
    "a period": ([1, 2, 3, 1, 2, 3, 1, 2], 1, 3, [3, 1, 2, 3]),
    "longer counts more than later": ([1, 2, 7, 9, 2, 8, 1, 2], 1, 3, [7, 9, 2, 8]),
    "later of two that are as long": ([1, 2, 7, 1, 2, 8, 1, 2], 1, 3, [8, 1, 2, 8]),
    "too short": ([2, 7, 3, 2], 2, 3, None),
    "never longer than max_n": ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, 2, [8, 1, 2, 3]),
    "as long as the text": ([6] * 9, 5, 64, [6, 6, 6, 6]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_what_followed_the_longest_suffix_is_proposed(form: str, case: str) -> None:
    text, min_n, max_n, drafts = TEXTS[case]
    plan, lengths, ids = text_step(text)
    compare(form, "look_up", plan, lengths, ids, min_n, max_n)
    assert lengths[DRAFTS, 1] == (4 if drafts else 0)
    assert drafts is None or ids[1, len(text) : len(text) + 4].tolist() == drafts


@pytest.mark.parametrize("num_ids", [4095, 4096, 4097, 4098, 9000, 32768])
def test_long_texts_are_looked_through(form: str, num_ids: int) -> None:
    """The occurrence stands at the beginning, or over the border of two blocks; or there are many."""
    rng = torch.Generator().manual_seed(num_ids)
    texts = [torch.randint(100, 30000, (num_ids,), generator=rng).tolist() for _ in range(3)]
    texts[0][:3] = texts[0][-3:] = [7, 8, 9]
    at = min(4094, num_ids - 9)
    texts[1][at : at + 3] = texts[1][-3:] = [7, 8, 9]
    for at in (5, 700, num_ids // 2, num_ids - 100):
        texts[2][at : at + 3] = [7, 8, 9]
    texts[2][-3:] = [7, 8, 9]
    far = torch.randint(100, 30000, (num_ids,), generator=rng).tolist()
    far[-3:] = [7, 8, 9]
    for at in range(5, num_ids - 9, 4096):  # by one lane of a kernel
        far[at : at + 3] = [7, 8, 9]
    plan, lengths, ids = text_step(*texts, far, torch.randint(2, (num_ids,), generator=rng).tolist())
    compare(form, "look_up", plan, lengths, ids, 2, 5)
    assert (lengths[DRAFTS, 1:5] == 4).all()


def test_the_best_token_is_the_lowest_of_the_highest_and_what_is_no_number_shows(form: str) -> None:
    logits = torch.randn(9, 300).round()
    logits[1, 7], logits[2, 5:9], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 3], logits[4, 200] = torch.inf, torch.nan
    _, tokens = compare(form, "best", logits)
    assert tokens[[1, 2, 4]].tolist() == [7, 5, 200]


def test_a_step_without_lines_has_no_best_token(form: str) -> None:
    compare(form, "best", torch.randn(0, 300))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_all_kernels_are_captured_and_replayed_for_another_plan() -> None:
    """Nothing that a plan says is part of a graph."""
    shape = Shape(6, 2, kinds=("decode",), num_features=64, dtype=torch.bfloat16)
    steps = [step_plans.make(seed, shape) for seed in range(3)]
    sizes = [max(step.num(column) for step in steps) for column in ("token", "line", "pair", "draft")]
    inputs = [inputs_of(step, sizes) for step in steps]
    here = [value.cuda() for value in inputs[0]]
    for value in here:
        assert value.is_contiguous()
    whole("cuda", *[value.clone() for value in here], sizes=sizes, most=shape.most)  # compiled now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = whole("cuda", *here, sizes=sizes, most=shape.most)
    for step in inputs:
        for place, value in zip(here, step, strict=True):
            place.copy_(value)
        graph.replay()
        theirs = [value.clone() for value in step]
        wanted = whole("reference", *theirs, sizes=sizes, most=shape.most)
        for number, (ours, true) in enumerate(zip(results, wanted, strict=True)):
            assert same_bits(ours.cpu(), true), f"result {number}"
        for number, (ours, true) in enumerate(zip(here[:-1], theirs[:-1], strict=True)):
            assert same_bits(ours.cpu(), true), f"argument {number}"


def inputs_of(step: Step, sizes: list[int]) -> list[torch.Tensor]:
    """Of one size for all steps; the answers last."""
    ids = torch.zeros(len(step.ids), 160, dtype=torch.int32)
    ids[:, : step.ids.shape[1]] = step.ids

    def padded(value: torch.Tensor, num: int) -> torch.Tensor:
        return torch.cat((value, value.new_zeros(num - len(value), *value.shape[1:])))

    tokens, lines, _, drafting = sizes
    values = [step.plan, step.changes, step.table, step.lengths, ids, padded(step.hidden, tokens), step.ring]
    values += [padded(step.chosen, lines), padded(step.logit, lines)]
    return [*values, torch.stack([padded(d, drafting) for d in step.drafted]), step.answers]


def whole(form: str, *values: torch.Tensor, sizes: list[int], most: int) -> list[torch.Tensor]:
    """A step of ops, one behind the other."""
    plan, changes, table, lengths, ids, hidden, ring, chosen, logit, drafted, answers = values
    op = {name: function_of(form, name) for name in STEP_OPS}
    tokens, lines, pairs, drafting = sizes
    op["change"](changes, table)
    results = list(op["fill"](plan, table, lengths, ids, tokens, lines))
    op["accept"](plan, chosen, logit, lengths, ids, answers, 1 + most, CHUNK)
    results += op["first_pairs"](plan, results[0], hidden, ring, lengths, ids, pairs, drafting)
    op["keep"](results[0], lengths, hidden, ring)
    for number, drafts in enumerate(drafted):
        op["write"](plan, drafts, lengths, ids, number)
        results += op["next_pairs"](plan, lengths, ids, number + 1, drafting)
    op["look_up"](plan, lengths, ids, 1, 3)
    op["tell"](plan, lengths, ids, answers, 1 + most, most)
    return results
