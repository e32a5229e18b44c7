"""Kernels by Triton's interpreter: two steps of two rows against the reference, by the launcher, and as told
beforehand to who has no launcher.

The other ops' test_triton.py run interpreted as they are; what is said here of bits only a GPU can say.
"""

import os
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from kit import ahead as steps
from kit.gpu_steps import Subject as OnGrid
from kit.gpu_steps import check_late_snapshot, halves
from kit.ops import Subject, int32, rel_error, row, same_bits, subject

from hemiola.plugins.attention.pages import CODES, FORMATS
from hemiola.plugins.attention.reference import attention as reference
from hemiola.plugins.spec import E4M3

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SUBJECTS = [
    subject("attention", 0.2, 0, 1.0, 1.0, H=4, D=32, G=2, Z=40, L=16, W=4),
    subject("attention", 0.2, 1, 1.0, 1.0, H=3, D=16, G=3, Z=40, L=16, W=4),
    subject("conv", E=48, W=4),
    subject("delta", G=1, K=16, H=2, V=32, J=1),
    subject("delta", G=1, K=16, H=1, V=16, J=16),
    subject("mamba2", 0.0, 1.0, H=2, P=16, G=1, D=16),
    subject("moe", "swiglu", E=6, K=2, F=32, J=32, I=16),
    subject("moe", "relu2", E=40, K=3, F=48, J=16, I=16),
    subject("route", "softmax", 3, 1, 1, True, 1.0, E=8),
]
EXACT = {"moe": {"x", "up", "down"}}  # the interpreter multiplies bf16 as integers


def listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def launcher(subject: Subject) -> Callable[..., Any]:
    return getattr(import_module(f"hemiola.plugins.{subject.name}.cuda"), subject.name)


def check(
    subject: Subject, run: Callable[..., Any], limit: float, dtype: torch.dtype, exact: Collection[str]
) -> None:
    """Outputs and states of both steps err by less than this."""
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for step in range(len(steps.STEPS)):
        mine = steps.arguments(subject, step, ours, exact=exact, dtype=dtype)
        results = run(*mine)
        ours = steps.states_of(subject, mine)
        true = steps.arguments(subject, step, [state.clone() for state in theirs], dtype=dtype)
        true = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in true]
        wanted = subject.op.reference(*true)
        theirs = steps.states_of(subject, true)
        for y, expected in zip(listed(results), listed(wanted), strict=True):
            assert y.shape == expected.shape and not y.isnan().any()
            assert rel_error(y, expected) < limit, f"step {step}"
    for mine, wanted in zip(ours, theirs, strict=True):
        there = ~wanted.isnan()
        assert there.any() and rel_error(mine[there], wanted[there]) < limit


@pytest.mark.parametrize(
    ("subject", "how"),
    [(subject, "launched") for subject in SUBJECTS]
    + [(subject, "told beforehand") for subject in {subject.name: subject for subject in SUBJECTS}.values()],
    ids=str,
)
def test_it_is_the_reference(subject: Subject, how: str) -> None:
    run = launcher(subject) if how == "launched" else partial(steps.interpreted, subject.op)
    check(subject, run, 1e-2, torch.bfloat16, EXACT.get(subject.name, ()))


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_an_fp32_engines_call_is_the_reference(subject: Subject) -> None:
    """Sums of fp32 in another order than the reference's, which is in fp64."""
    check(subject, launcher(subject), 2e-6, torch.float32, ())


def test_what_nobody_wrote_before_the_first_place_makes_no_nan() -> None:
    """An MTP head has no entry at place 0: on fresh memory it computed NaN."""
    from hemiola.plugins.attention.cuda import attention

    q, k, v = (torch.randn(20, heads, 16).bfloat16() for heads in (2, 1, 1))
    pools = [torch.full((3, 16, 1, 16), torch.nan).bfloat16() for _ in range(2)]
    where = int32([1, 2]), int32(row(num_tokens=20, committed=1)), torch.arange(1, 21, dtype=torch.int32)
    o = attention(q, k, v, *pools, *where, 0.25, 1, 1.0, 1.0)
    assert not o.isnan().any()


def test_a_prompt_that_a_gpu_has_a_kernel_of_its_own_for_is_interpreted_all_the_same() -> None:
    """Heads of 256, pages of 64: gluon.py's on sm_90, which is what a CPU passes for."""
    from hemiola.plugins.attention.cuda import attention

    q, k, v = (torch.randn(34, heads, 256).bfloat16() for heads in (4, 1, 1))
    pools = [torch.full((2, 64, 1, 256), torch.nan).bfloat16() for _ in range(2)]
    own = [pool.clone() for pool in pools]
    where = int32([1]), int32(row(num_tokens=34)), torch.arange(34, dtype=torch.int32)
    o = attention(q, k, v, *pools, *where, 0.0625, 0, 1.0, 1.0)
    wanted = reference(q.float(), k.float(), v.float(), *own, *where, 0.0625, 0, 1.0, 1.0)
    assert rel_error(o, wanted) < 1e-2


@pytest.mark.parametrize("page_len", [16, 48])
def test_pages_of_e4m3_are_the_references_bit_for_bit(page_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, subnormals and numbers beyond 448 among them. The interpreter's cast rounds some numbers wrongly;
    torch's takes its place."""
    from triton.runtime import interpreter

    from hemiola.plugins.attention.cuda import attention

    theirs = interpreter._convert_float

    def cast(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) != "fp8e4nv":
            return theirs(data, source, target, rounding)
        return torch.from_numpy(data.copy()).to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", cast)
    scales = 0.25, 0.0390625
    q, k, v = (torch.randn(70, heads, 32).bfloat16() for heads in (6, 2, 2))
    k[:, 0], v[:, 1] = k[:, 0] * 400, (torch.arange(70 * 32).view(70, 32) % 512 - 256) * scales[1] / 1024
    pools = [torch.full((7, page_len, 2, 32), torch.nan, dtype=E4M3) for _ in range(2)]
    told = [pool.clone() for pool in pools]
    table = int32(list(range(6, 6 - -(-70 // page_len), -1)))
    where = table, int32(row(num_tokens=70)), torch.arange(70, dtype=torch.int32)
    o = attention(q, k, v, *pools, *where, 0.2, 0, *scales)
    wanted = reference(q.float(), k.float(), v.float(), *told, *where, 0.2, 0, *scales)
    assert all(same_bits(mine, own) for mine, own in zip(pools, told, strict=True))
    assert rel_error(o, wanted) < 1e-2


@pytest.mark.parametrize(
    ("kv", "page_len", "dtype"),
    [("turboquant_4bit_nc", 48, torch.float32), ("turboquant_3bit_nc", 64, torch.bfloat16)],
)
def test_pages_of_codes_are_the_references_byte_for_byte(kv: str, page_len: int, dtype: torch.dtype) -> None:
    """Two pages, of which a step finds the first written; and what queries make of them."""
    from hemiola.plugins.attention.cuda import attention

    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(70, heads, 64, generator=rng).to(dtype) for heads in (4, 2, 2))
    k[3], v[3] = 0, 2
    pools = [torch.full((3, page_len, 2, width), 0xFF, dtype=CODES) for width in FORMATS[kv].widths(64)]
    told = [pool.clone() for pool in pools]
    table, numbers = int32([2, 1]), (0.2, 0, 1.0, 1.0)
    for begin, end in ((0, 66), (66, 70)):
        line = int32(row(num_tokens=end - begin, committed=begin))
        at = torch.arange(begin, end, dtype=torch.int32)
        new = [x[begin:end] for x in (q, k, v)]
        o = attention(*new, *pools, table, line, at, *numbers)
        wanted = reference(*(x.double() for x in new), *told, table, line, at, *numbers)
    assert all(same_bits(mine, own) for mine, own in zip(pools, told, strict=True))
    assert rel_error(o, wanted) < (1e-2 if dtype is torch.bfloat16 else 2e-6)


class _Wide:
    """torch, whose new bf16 tensors are fp32: rounded, outputs hide in which order they were summed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.float32 if dtype is torch.bfloat16 else dtype, device=device)


@pytest.mark.parametrize("enough", [0, 100], ids=["groups", "tiles"])
def test_pieces_of_attention_are_joined_in_the_order_of_one_program(
    enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hemiola.plugins.attention import cuda

    monkeypatch.setattr(cuda, "GROUP", 64)
    monkeypatch.setattr(cuda, "TILE", 16)
    monkeypatch.setattr(cuda, "torch", _Wide())
    tokens, plan = (
        [torch.randn(140, heads, 32).bfloat16() for heads in (4, 2, 2)],
        cuda.TilePlan(16, 1, 4, 2, enough),
    )
    pools, table = (
        [torch.full((10, 16, 2, 32), torch.nan).bfloat16() for _ in range(2)],
        int32(list(range(1, 10))),
    )
    at = torch.arange(140, dtype=torch.int32)
    numbers = (0.2, 0, 1.0, 1.0)
    for pool, own in zip(pools, tokens[1:], strict=True):
        pool[1:].flatten(0, 1)[:140] = own

    def since(first: int) -> torch.Tensor:
        rows = int32(row(num_tokens=140 - first, committed=first))
        own = (part[first:] for part in tokens)
        return cuda.attention(*own, *pools, table, rows, at[first:], *numbers, plan=plan)

    together = since(120)
    assert together.dtype is torch.float32 and torch.equal(since(137), together[17:])


@pytest.mark.parametrize(("space", "enough"), [(2, 0), (6, 0), (6, 10**6), (10**6, 10**6)])
def test_rows_with_and_without_space_for_their_pieces_have_the_bits_of_a_row_alone(
    space: int, enough: int, monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    """Beside a row of no token and a dead one: who has no space walks, who comes behind has none either."""
    from hemiola.plugins.attention import cuda

    monkeypatch.setattr(cuda, "FP32_GROUP", 32)
    nums, committed = [3, 0, 1, 2, 2], [70, 33, 40, 9, 101]
    firsts = [sum(nums[:n]) for n in range(5)]
    rows = [
        row(first=firsts[n], num_tokens=nums[n], slot=n != 3 and n + 1, committed=committed[n])
        for n in range(5)
    ]
    at = int32(*(committed[n] + t for n in range(5) for t in range(nums[n])))
    tokens = [torch.randn(8, heads, 16) for heads in (2, 1, 1)]
    pools, table = [torch.randn(36, 16, 1, 16) for _ in range(2)], torch.randperm(35).int().view(5, 7) + 1

    def call(*chosen: int) -> torch.Tensor:
        given = int32(*(rows[n] for n in chosen)).view(-1, 8)
        own, plan = [pool.clone() for pool in pools], cuda.TilePlan(16, 1, 1, 2, enough)
        return cuda.attention(*tokens, *own, table[list(chosen)], given, at, 0.2, 0, 1.0, 1.0, plan=plan)

    alone = sum((call(n) for n in (0, 2, 4)), torch.zeros(()))  # of others' tokens it is zero
    monkeypatch.setattr(cuda, "_PARTIAL_NUMBERS", space * 16 * 16)
    assert torch.equal(call(*range(5)), alone)


@pytest.mark.parametrize(
    ("num_drafts", "plan", "order"),
    [(9, None, "forwards"), (20, (8, 128), "backwards")],
    indirect=["order"],
)
def test_convs_late_snapshot_has_no_columns_of_the_tokens_behind_it(
    num_drafts: int, plan: tuple[int, int] | None, order: None
) -> None:
    """They go to the same places of the ring, where there are more drafts than a chunk."""
    taps = [torch.randn(shape).bfloat16() for shape in ((48, 4), 48)]
    check_late_snapshot(
        OnGrid("conv", {"E": 48, "W": 4}, 8, lambda num: [halves(num, 48)], taps, (), num_drafts, plan)
    )


def test_all_rows_come_once_those_first_that_pass_an_edge() -> None:
    """Of 150, 22 of them long, in several looks at 64."""
    from hemiola.plugins.gpu.rows import passing_first

    nums = [40 if i % 7 == 2 else 1 + i % 4 for i in range(150)]
    rows = int32([[i, nums[i], i % 3, 1 + i, 32 + i % 17, 32, 0, 0] for i in range(150)]).view(-1, 8)
    _, num, drafts, _, committed, edge, _, _ = rows.unbind(1)
    passes = ((committed + num > edge + 16) | (committed + num - drafts >= edge + 16)).int() * (num < 40)
    wanted = torch.argsort(passes, descending=True, stable=True)
    whole, numbers = torch.full((150, 16), -1, dtype=torch.int32), torch.full((150,), -1, dtype=torch.int32)
    passing_first[(1,)](whole, rows, 150, 16, True)
    passing_first[(1,)](numbers, rows, 150, 16, False)
    assert 0 < passes.sum() < 150 and torch.equal(numbers, wanted.int())
    assert torch.equal(whole[:, :8], rows[wanted]) and torch.equal(whole[:, 8], wanted.int())
    assert whole[0, 9] == (num == 40).sum() == 22


def test_a_number_behind_a_kernels_arguments_is_found() -> None:
    """By kit/memcheck.py, which watches all interpreted kernels."""
    from triton.runtime.errors import InterpreterError

    from hemiola.plugins.gpu.rows import passing_first

    rows, short = int32(*[row()] * 150), torch.empty(200, dtype=torch.int32)[:149]
    with pytest.raises(InterpreterError, match=r"passing_first stores number 149 of order, \[149\]"):
        passing_first[(1,)](short, rows, 150, 16, False)


def test_an_int_that_nobody_wrote_is_nowhere_whatever_it_is_multiplied_by(poisoned_empty: None) -> None:
    """2 to the 29 times a row's eight columns was 0 in 32 bits: the first row."""
    wild = torch.empty(1, dtype=torch.int32)
    strides = torch.cat([torch.arange(1, 4097), torch.arange(256, 2**17, 256)]).int()
    places = wild * strides
    assert wild < 2**30 and ((places < 0) | (places > 500_000)).all()


NO_TOKEN = {
    subject("conv", E=48, W=4): None,
    subject("delta", G=1, K=16, H=1, V=64, J=1): (32, 2, 3, 2, 32, 2, 2, 3, 2, 168, 7, True),
    subject("mamba2", 0.0, 1.0, H=2, P=16, G=1, D=16): None,
}


@pytest.mark.parametrize(("subject", "plan"), NO_TOKEN.items(), ids=str)
def test_a_step_of_no_token_leaves_all_as_it_was(
    subject: Subject, plan: tuple[Any, ...] | None, poisoned_empty: None
) -> None:
    """Nobody wrote delta's order of rows: it was whatever memory held, and the process died now and then."""
    module = import_module(f"hemiola.plugins.{subject.name}.cuda")
    mine = steps.as_on_a_gpu(subject.op, subject.arguments(0))
    before = [state.clone() for state in steps.states_of(subject, mine)]
    assert not getattr(module, subject.name)(*mine, plan=plan and module.TilePlan(*plan)).numel()
    assert all(map(same_bits, steps.states_of(subject, mine), before))
