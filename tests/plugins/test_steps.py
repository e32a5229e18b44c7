"""Steps: sizes as formulas, memory that results share, and what a replay says of what it was given."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hemiola.plugins.cpu.code import Case, Recorder, View, code_of, lines
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import SUM, combine, concatenate, gather
from hemiola.plugins.cpu.simd import get_int, put_int, put_long
from hemiola.plugins.cpu.steps import RecordedStep, _lives, _plan, _room, num_calls, run_all
from hemiola.plugins.sizes import FreeSize, Number, ceil_div, evaluate, least, most

T, N = FreeSize("T"), FreeSize("N")


@Kernel
def _write(item, scratch, value, out, fault):
    """out[item] = value, unless that is 0."""
    if value == 0:
        put_long(fault, 1, 7)
        put_long(fault, 0, 1)
    put_int(out, item, value)


@Kernel
def _next(item, scratch, source, out):
    put_int(out, item, get_int(source, item) + 1)


def numbers() -> st.SearchStrategy[Number]:
    leaves = st.sampled_from([T, N]) | st.integers(0, 40)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a + b, inner, inner),
            st.builds(lambda a, b: a * b, inner, inner),
            st.builds(lambda a, b: a * b, st.sampled_from([T, N]), st.floats(0, 9)),
            st.builds(lambda a, b: ceil_div(a, b), inner, st.integers(1, 20)),
            st.builds(lambda a, b: ceil_div(a, most(b, 1)), inner, inner),
            st.builds(least, inner, inner),
            st.builds(most, inner, inner),
            st.builds(lambda a, b: a // b, inner, st.integers(1, 20)),
        ),
        max_leaves=6,
    )


def largest(number: Number, sizes: dict[str, int]) -> int:
    """Of the number and all that it is computed from."""
    inner = [] if isinstance(number, int) or number.name else [number.a, number.b]
    return max([evaluate(number, sizes), *(largest(part, sizes) for part in inner)])


@given(st.lists(numbers(), min_size=1, max_size=5), st.integers(0, 3000), st.integers(1, 64))
@example([(T + T) * (T + T) * ((T + T) * (T + T))], 107, 1)  # just below 2^31
def test_a_replay_computes_sizes_as_python_does(wanted: list[Number], t: int, n: int) -> None:
    sizes = {"T": t, "N": n}
    assume(max(largest(number, sizes) for number in wanted) < 2**31 - 1)  # they are read as int32
    recorder, found = Recorder(), torch.zeros(len(wanted), dtype=torch.int32)
    code, faults = recorder.given(found), recorder.fault()
    for place, number in enumerate(wanted):
        place_of = View(recorder, code.buffer, (1,), (1,), torch.int32, place)
        recorder.call(_write, 1, 0, number + 1, place_of, faults)
    RecordedStep(recorder, ["T", "N"]).run(sizes)
    assert found.tolist() == [evaluate(number, sizes) + 1 for number in wanted]


class Chain(NamedTuple):
    step: RecordedStep
    result: torch.Tensor


def chain(length: int, poisoned: bool = False) -> Chain:
    """Numbers that are counted up from result to result, in as many lines as the step has tokens."""
    recorder, out = Recorder(), torch.zeros(100, dtype=torch.int32)
    value = recorder.empty(T, dtype=torch.int32)
    recorder.call(_write, T, 0, 5, value, recorder.fault())
    for _ in range(length):
        following = recorder.empty(T, dtype=torch.int32)
        recorder.call(_next, T, 0, value, following)
        value = following
    recorder.call(_next, T, 0, value, recorder.given(out))
    return Chain(RecordedStep(recorder, ["T"], poisoned), out)


def test_every_call_is_seen_to_move() -> None:
    before = num_calls()
    chain(9).step.run({"T": 3})
    assert num_calls() == before + 11


@pytest.mark.parametrize("poisoned", [False, True])
def test_results_that_are_not_wanted_any_more_lend_their_memory(poisoned: bool) -> None:
    step, result = chain(9, poisoned)
    for size in (1, 100, 3):
        result.zero_()
        step.run({"T": size})
        assert result.tolist() == [15] * size + [0] * (100 - size)
    assert evaluate(step._arena_bytes, {"T": 10}) == 10 * 2 * 64, "two results at a time, a cache line each"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.booleans()), max_size=20))
def test_what_is_wanted_at_once_never_lies_in_one_place(spans: list[tuple[int, int, bool]]) -> None:
    """Results that live for some calls, per token or per row."""
    recorder = Recorder()
    made = [recorder.empty(N if by_row else T, width) for _, width, by_row in spans]
    for n, view in enumerate(made):
        for other, (age, *_) in zip(made[: n + 1], spans, strict=False):
            if other is view or made.index(other) + age >= n:
                recorder.call(_next, 1, 0, other, other)
    lives, (places, end) = _lives(recorder.calls), _plan(recorder.calls)
    sizes = {"T": 3, "N": 2, "arena": 0}
    at = {b: (evaluate(p, sizes), evaluate(b.lead, sizes) * _room(b)) for b, p in places.items()}
    for one, (first, size) in at.items():
        assert first % 64 == 0 and first + size <= evaluate(end, sizes)
        for other, (start, length) in at.items():
            together = lives[one].first <= lives[other].last and lives[other].first <= lives[one].last
            assert one is other or not together or first + size <= start or start + length <= first


def test_a_step_takes_scratch_memory_that_nobody_counts(threads: int) -> None:
    recorder = Recorder()
    value = recorder.empty(T, 16, dtype=torch.int32)
    recorder.call(_next, T, 0, value, value, scratch=2**20)
    assert RecordedStep(recorder, ["T"]).room({"T": 3}) == 3 * 64 + threads * 2**20


def test_a_fault_ends_the_step_with_its_message_and_no_other_call_runs(threads: int) -> None:
    recorder, out = Recorder(), torch.zeros(4, dtype=torch.int32)
    case = Case(ValueError, "seven is {0}")
    recorder.call(_write, 4, 1e9, FreeSize("value"), recorder.given(out), recorder.fault(case))
    recorder.call(_next, 4, 1e9, recorder.given(out), recorder.given(out))
    step = RecordedStep(recorder, ["value"])
    for value, expected in ((3, 4), (0, 0), (9, 10)):
        with nullcontext() if value else pytest.raises(ValueError, match="seven is 7"):
            step.run({"value": value})
        assert out.tolist() == [expected] * 4


def test_steps_run_one_after_the_other_until_one_finds_a_fault(threads: int) -> None:
    """Any of them more than once, each time with its own sizes."""
    first, second = Recorder(), Recorder()
    out, value = torch.zeros(9, dtype=torch.int32), FreeSize("value")
    first.call(_write, T, 1e9, value, first.given(out), first.fault(Case(ValueError, "seven is {0}")))
    source = second.empty(T, dtype=torch.int32)
    second.call(_next, T, 1e9, second.given(out), source)
    second.call(_next, T, 1e9, source, second.given(out))
    write, twice = RecordedStep(first, ["value", "T"]), RecordedStep(second, ["T"])
    run_all([(write, {"value": 5, "T": 9}), (twice, {"T": 3}), (twice, {"T": 7}), (twice, {"T": 1})])
    assert out.tolist() == [11, 9, 9, 7, 7, 7, 7, 5, 5]
    with pytest.raises(ValueError, match="seven is 7"):
        run_all([(twice, {"T": 2}), (write, {"value": 0, "T": 1}), (twice, {"T": 9})])
    assert out.tolist() == [0, 11, 9, 7, 7, 7, 7, 5, 5]
    run_all([(twice, {"T": 9})])
    assert out.tolist() == [2, 13, 11, 9, 9, 9, 9, 7, 7]


def test_a_size_that_no_step_has_is_refused() -> None:
    recorder = Recorder()
    recorder.call(_next, FreeSize("M"), 0, 0, 0)
    with pytest.raises(AssertionError, match="'M' is no input of the step"):
        RecordedStep(recorder, ["T"])


def test_only_the_first_dimension_of_a_result_may_be_free() -> None:
    with pytest.raises(AssertionError, match="only the first"):
        Recorder().empty(4, T)


@pytest.mark.parametrize("width", [3, 16, 40])
def test_torchs_functions_as_kernels(width: int) -> None:
    a, b = torch.randn(2, 20, width + 9)[:, :, 5 : width + 5]
    assert torch.equal(combine(SUM, a, b), a + b)
    assert torch.equal(concatenate([a, b[:, :2]]), torch.cat((a, b[:, :2]), 1))
    ids = torch.tensor([19, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(gather(a, ids), a[ids.long()])
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match=f"line {wrong} is wanted of 20"):
            gather(a, torch.tensor([0, wrong], dtype=torch.int32))


VIEWS: dict[str, Callable] = {
    "split": lambda x: x.split([1, 3, 2], 1)[1],
    "heads": lambda x: x.view(-1, 2, 3) if isinstance(x, torch.Tensor) else x.view([2, 3]),
    "of heads": lambda x: (x.view(-1, 3, 2) if isinstance(x, torch.Tensor) else x.view([3, 2])).split(
        [1, 2], 1
    )[1],
    "unsqueezed": lambda x: x.unsqueeze(2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_lie_where_torchs_do(name: str) -> None:
    tensor = torch.zeros(5, 8)[:, 1:7]
    view, wanted = VIEWS[name](Recorder().given(tensor)), VIEWS[name](tensor)
    assert view.shape == wanted.shape and view.strides == wanted.stride()
    assert view.offset == wanted.storage_offset() - tensor.storage_offset()
    assert view.in_lines == wanted[0].is_contiguous() and code_of(view) is not code_of(wanted)


def test_lines_copies_only_what_does_not_lie_in_lines() -> None:
    x = torch.randn(5, 70)
    for kept in (x, x[:, 3:67], x[::2], x[1:], x[:1, :7], x[:0, 3:67], x[:1].expand(4, -1)):
        assert lines(kept) is kept
    for crossed in (x.mT, x[:, ::2]):
        copy = lines(crossed)
        assert copy.is_contiguous() and torch.equal(copy, crossed)
