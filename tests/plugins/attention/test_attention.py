"""Paged attention against its reference and torch's SDPA; exact numerics against itself under every split."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from kit.grid import COMPILED, Form, form, needs_numba, same_bits

from hemiola.plugins import jit, references
from hemiola.plugins.attention.spec import ATTENTION


@dataclass(frozen=True)
class Case:
    """A step; every list has one entry per row."""

    kv_lens: tuple[int, ...] = (70, 3, 129)
    num_tokens: tuple[int, ...] = (1, 1, 1)
    heads: int = 8
    groups: int = 2
    head_dim: int = 64
    page_len: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype = torch.float32
    spare_width: int = 0  # stale columns of the page table

    def __str__(self) -> str:
        changed = [f"{name}={getattr(self, name)}" for name in self.__dict__ if name in self._changed()]
        return ",".join(changed).replace(" ", "").replace("torch.", "") or "base"

    def _changed(self) -> list[str]:
        return [name for name, value in self.__dict__.items() if value != getattr(Case, name)]


BASE = Case()
CASES = [
    BASE,
    *(
        replace(BASE, heads=heads, groups=groups)
        for heads, groups in ((1, 1), (4, 4), (6, 2), (32, 2), (32, 1))
    ),
    *(replace(BASE, head_dim=head_dim) for head_dim in (16, 24, 80, 256)),
    *(replace(BASE, page_len=page_len) for page_len in (32, 64, 128)),
    *(replace(BASE, page_dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(
        replace(BASE, dtype=dtype, page_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ),
    replace(BASE, spare_width=3),
    replace(BASE, kv_lens=(1,), num_tokens=(1,)),
    replace(BASE, kv_lens=(64,), num_tokens=(1,)),
    replace(BASE, kv_lens=(64, 64), num_tokens=(1, 1)),
    replace(BASE, kv_lens=(2500, 5, 2490), num_tokens=(1, 1, 1)),
    replace(BASE, num_tokens=(4, 3, 4)),
    replace(BASE, num_tokens=(8, 0, 2)),
    replace(BASE, num_tokens=(9, 2, 17)),
    replace(BASE, kv_lens=(20, 150), num_tokens=(20, 150)),
    replace(BASE, kv_lens=(300, 66, 40), num_tokens=(140, 1, 0)),
    replace(BASE, kv_lens=(5, 5), num_tokens=(0, 0)),
]
STALE = 10**6  # in the page table behind a row's pages: no page
MODES = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
FORMS = pytest.mark.parametrize("name", ["torch", COMPILED])


def make_step(case: Case, seed: int = 0) -> list:
    """An op's arguments. What a row may not read is NaN: page 0, free pages, places behind its tokens."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = [-(-kv_len // case.page_len) for kv_len in case.kv_lens]
    num_pages = sum(widths) + 3
    page_shape = (num_pages, case.page_len, case.groups, case.head_dim)
    k_pages, v_pages = (torch.full(page_shape, torch.nan, dtype=case.page_dtype) for _ in range(2))
    page_table = torch.full((len(widths), max(widths) + case.spare_width), STALE, dtype=torch.int32)
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    positions = []
    for row, (kv_len, num_tokens) in enumerate(zip(case.kv_lens, case.num_tokens, strict=True)):
        for place in range(widths[row]):
            page = page_table[row, place] = free.pop()
            held = min(max(kv_len - num_tokens - place * case.page_len, 0), case.page_len)
            k_pages[page, :held] = normal(held, *page_shape[2:], dtype=case.page_dtype)
            v_pages[page, :held] = normal(held, *page_shape[2:], dtype=case.page_dtype)
        positions += range(kv_len - num_tokens, kv_len)
    total = len(positions)
    return [
        normal(total, case.heads, case.head_dim),
        normal(total, case.groups, case.head_dim),
        normal(total, case.groups, case.head_dim),
        k_pages,
        v_pages,
        page_table,
        torch.tensor([0, *torch.tensor(case.num_tokens).cumsum(0)], dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        case.head_dim**-0.5,
    ]


def fits(case: Case) -> bool:
    """Whether the compiled form takes it."""
    return case.dtype == case.page_dtype == torch.float32 and case.head_dim % 16 == 0


def both_forms(cases: list[Case]) -> pytest.MarkDecorator:
    """Parametrises `case` and `name`; the compiled form gets what fits it."""
    table = [pytest.param(case, "torch", id=f"{case}-torch") for case in cases]
    fitting = [case for case in cases if fits(case)]
    table += [pytest.param(case, "compiled", id=f"{case}-compiled", marks=needs_numba) for case in fitting]
    return pytest.mark.parametrize("case,name", table)


def copy(step: list) -> list:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in step]


def close(case: Case) -> dict[str, float]:
    """Both sides compute in fp32 but add in other orders; a lower dtype may then round to its neighbour."""
    rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5, torch.float64: 1e-12}
    return {"rtol": rtol[case.dtype], "atol": 1e-12 if case.dtype == torch.float64 else 2e-6}


@MODES
@both_forms(CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_reference(case: Case, name: str, exact: bool) -> None:
    step = make_step(case)
    seen, told = copy(step), copy(step)
    o = form(ATTENTION, name)(*seen, exact, 0)
    expected = references.attention(*told, exact, 0)
    torch.testing.assert_close(o, expected, **close(case))
    for argument, (mine, reference) in enumerate(zip(seen[:8], told[:8], strict=True)):
        same = torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))
        assert same, f"argument {argument} differs after the call"


@MODES
@FORMS
@pytest.mark.parametrize("copies", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 40], ids="tokens={}".format)
def test_equals_sdpa(copies: int, num_tokens: int, name: str, exact: bool) -> None:
    """torch's own attention over the same keys in one tensor; fp32 sums in other orders."""
    attention = form(ATTENTION, name)
    case = replace(BASE, kv_lens=(90,), num_tokens=(90,), heads=2 * copies, head_dim=32)
    step = make_step(case)
    q, k, v, pages, scale = *step[:3], step[3:5], step[8]
    page_table = step[5]
    q_heads, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(
        q_heads, k_heads, v_heads, is_causal=True, enable_gqa=True, scale=scale
    )[0].transpose(0, 1)
    done = 90 - num_tokens
    for first, last in ((0, done), (done, 90)):
        cu_tokens = torch.tensor([0, last - first], dtype=torch.int32)
        positions = torch.arange(first, last, dtype=torch.int32)
        part = slice(first, last)
        o = attention(q[part], k[part], v[part], *pages, page_table, cu_tokens, positions, scale, exact, 0)
        torch.testing.assert_close(o, expected[part], rtol=1e-5, atol=2e-6)


@MODES
@FORMS
def test_padding_row_writes_only_the_dump_page(name: str, exact: bool) -> None:
    """A feed pads with one row of table 0 whose tokens all stand at position 0."""
    attention = form(ATTENTION, name)
    step = make_step(replace(BASE, kv_lens=(70, 1), num_tokens=(1, 1)))
    alone = copy(step)
    q, k, v, k_pages, v_pages, page_table, cu_tokens, positions, scale = step
    page_table[1] = 0
    padding = torch.randn(30, *q.shape[1:])
    q = torch.cat([q, padding])
    k, v = (torch.cat([x, padding[:, : k.shape[1]]]) for x in (k, v))
    cu_tokens = torch.tensor([0, 1, 32], dtype=torch.int32)
    positions = torch.cat([positions[:1], torch.zeros(31, dtype=torch.int32)])
    o = attention(q, k, v, k_pages, v_pages, page_table, cu_tokens, positions, scale, exact, 0)
    alone[:3] = [x[:1] for x in alone[:3]]
    alone[5:8] = [alone[5][:1], alone[6][:2], alone[7][:1]]
    expected = attention(*alone, exact, 0)
    assert o.isfinite().all()
    strict = exact or name == "compiled"
    torch.testing.assert_close(o[:1], expected, rtol=0 if strict else 1e-5, atol=0 if strict else 2e-6)
    assert torch.equal(k_pages[1:].nan_to_num(7), alone[3][1:].nan_to_num(7))


@dataclass(frozen=True)
class Shape:
    """What is constant within one engine."""

    heads: int = 8
    groups: int = 2
    head_dim: int = 64

    def __str__(self) -> str:
        return f"heads={self.heads}/{self.groups}x{self.head_dim}"


SHAPES = [Shape(), Shape(4, 4, 16), Shape(10, 2, 80), Shape(32, 1, 128), Shape(2, 2, 256)]
LENGTHS = (1, 15, 64, 129, 70, 333)
KINDS = {  # exact numerics of the torch form, and both of the compiled form
    "torch": lambda *arguments: form(ATTENTION, "torch")(*arguments, True, 0),
    "compiled-fast": lambda *arguments: form(ATTENTION, "compiled")(*arguments, False, 0),
    "compiled-exact": lambda *arguments: form(ATTENTION, "compiled")(*arguments, True, 0),
}
EXACT = pytest.mark.parametrize(
    "kind", ["torch", *(pytest.param(f"compiled-{mode}", marks=needs_numba) for mode in ("fast", "exact"))]
)


def run_plan(
    attention: Form,
    sequences: list,
    shape: Shape,
    plan: list[dict[int, int]],
    page_len: int,
    rng: random.Random,
) -> list:
    """Outputs per sequence when each step of `plan` brings that many tokens of these sequences."""
    spare = rng.randrange(4)
    width = max(-(-len(q) // page_len) for q, _, _ in sequences) + spare
    pages = [torch.full((len(sequences) * width + 1, page_len, shape.groups, shape.head_dim), torch.nan)] * 2
    pages = [x.clone() for x in pages]
    free = list(range(1, len(pages[0])))
    rng.shuffle(free)
    table = torch.tensor(free, dtype=torch.int32).view(len(sequences), width)
    done = [0] * len(sequences)
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in plan:
        order = list(step)
        rng.shuffle(order)
        parts = {index: slice(done[index], done[index] + step[index]) for index in order}
        q, k, v = (torch.cat([sequences[index][i][parts[index]] for index in order]) for i in range(3))
        cu_tokens = torch.tensor([0, *torch.tensor([step[index] for index in order]).cumsum(0)]).int()
        positions = torch.cat([torch.arange(parts[index].start, parts[index].stop) for index in order]).int()
        o = attention(q, k, v, *pages, table[order], cu_tokens, positions, shape.head_dim**-0.5)
        for index, first, last in zip(order, cu_tokens.tolist(), cu_tokens.tolist()[1:], strict=False):
            outputs[index].append(o[first:last])
            done[index] = parts[index].stop
    return [torch.cat(parts) for parts in outputs]


def random_plan(rng: random.Random, lengths: tuple[int, ...]) -> list[dict[int, int]]:
    """Prompt chunks and single tokens of all sequences in one mixture."""
    left = dict(enumerate(lengths))
    plan = []
    while left:
        step = {i: min(left[i], rng.choice((1, 2, 5, 33, 64, 100, 333))) for i in left if rng.random() < 0.7}
        left = {i: n - step.get(i, 0) for i, n in left.items() if n > step.get(i, 0)}
        plan += [step] if step else []
    return plan


@EXACT
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_bits_depend_on_the_own_prefix_only(shape: Shape, kind: str) -> None:
    check_plans(KINDS[kind], shape, seeds=[0, 1, 2, 3], threads=1)


@EXACT
@pytest.mark.parametrize("shape", [Shape(), Shape(10, 2, 80)], ids=str)
def test_exact_bits_do_not_depend_on_threads(
    shape: Shape, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "WORTH_A_THREAD", -1)
    check_plans(KINDS[kind], shape, seeds=[threads], threads=threads)


def check_plans(attention: Form, shape: Shape, seeds: list[int], threads: int) -> None:
    """Random mixtures give every sequence the bits of its own prefill in one step on one thread."""
    generator = torch.Generator().manual_seed(1)
    heads = (shape.heads, shape.groups, shape.groups)
    sequences = [[torch.randn(n, h, shape.head_dim, generator=generator) for h in heads] for n in LENGTHS]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [run_plan(attention, [s], shape, [{0: len(s[0])}], 16, random.Random(0))[0] for s in sequences]
    torch.set_num_threads(threads)
    for seed in seeds:
        print("seed", seed)
        rng = random.Random(seed)
        page_len = (16, 32, 64, 128)[seed % 4]
        together = run_plan(attention, sequences, shape, random_plan(rng, LENGTHS), page_len, rng)
        for index, (o, expected) in enumerate(zip(together, alone, strict=True)):
            differing = (o != expected).flatten(1).any(1).nonzero().flatten().tolist()
            assert not differing, f"sequence {index}, page_len {page_len}: tokens {differing[:10]} differ"
    torch.set_num_threads(before)


@EXACT
@pytest.mark.parametrize("page_len", [32, 128])
def test_exact_decode_equals_prefill_token_by_token(page_len: int, kind: str) -> None:
    shape = Shape()
    generator = torch.Generator().manual_seed(2)
    sequence = [torch.randn(130, heads, 64, generator=generator) for heads in (8, 2, 2)]
    whole = run_plan(KINDS[kind], [sequence], shape, [{0: 130}], 16, random.Random(0))[0]
    single = run_plan(KINDS[kind], [sequence], shape, [{0: 1}] * 130, page_len, random.Random(1))[0]
    assert torch.equal(whole, single)


@MODES
@FORMS
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 150])
def test_keys_before_the_first_place_are_not_seen(num_tokens: int, name: str, exact: bool) -> None:
    """An MTP head has no pair at place 0: what stands there may be poison."""
    generator = torch.Generator().manual_seed(5)
    start = 70
    pages = torch.full((2, 16, 16, 2, 32), torch.nan)
    pages.view(2, -1, 2, 32)[:, 17 : 16 + start] = torch.randn(2, start - 1, 2, 32, generator=generator)
    page_table = torch.arange(1, 15, dtype=torch.int32)[None]
    q = torch.randn(num_tokens, 4, 32, generator=generator)
    k, v = torch.randn(2, num_tokens, 2, 32, generator=generator)
    rows = (
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.arange(start, start + num_tokens, dtype=torch.int32),
    )
    expected = references.attention(q, k, v, *pages.clone(), page_table, *rows, 0.2, exact, 1)
    assert not expected.isnan().any()
    o = form(ATTENTION, name)(q, k, v, *pages.clone(), page_table, *rows, 0.2, exact, 1)
    assert (o - expected).abs().max() < 1e-5  # both in fp32, in other orders


@FORMS
@pytest.mark.parametrize("first", [0, 1])
def test_a_prompt_from_place_0_on(first: int, name: str) -> None:
    """With `first` = 1 the query at place 0 sees no key, and its output is zero."""
    step = make_step(replace(BASE, kv_lens=(70, 1, 33), num_tokens=(70, 1, 33)))
    for exact in (False, True):
        expected = references.attention(*copy(step), exact, first)
        o = form(ATTENTION, name)(*copy(step), exact, first)
        seen = step[7] >= first
        torch.testing.assert_close(o[seen], expected[seen], rtol=1e-5, atol=2e-6)
        if first and name == "compiled":
            assert (o[~seen] == 0).all()


@MODES
@needs_numba
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_of_fitting_sizes_is_compiled_and_the_rest_is_not(case: Case, exact: bool) -> None:
    """Which form ran shows in the last bits of generic numbers."""
    step = make_step(case)
    o = torch.ops.hemiola.attention(*copy(step), exact, 0)
    assert same_bits(o, form(ATTENTION, "compiled" if fits(case) else "torch")(*copy(step), exact, 0))
    if fits(case) and max(case.kv_lens) > 60 and sum(case.num_tokens) > 2:
        assert not same_bits(o, form(ATTENTION, "torch")(*copy(step), exact, 0))


@needs_numba
@pytest.mark.parametrize("case", [case for case in CASES if fits(case)], ids=str)
def test_the_compiled_form_is_always_exact(case: Case) -> None:
    step = make_step(case)
    fast, exact = (form(ATTENTION, "compiled")(*copy(step), flag, 0) for flag in (False, True))
    assert same_bits(fast, exact)


@needs_numba
def test_page_len_changes_no_bit_of_the_compiled_form() -> None:
    """48 is a multiple of 16 and no part of a span."""
    generator = torch.Generator().manual_seed(3)
    sequence = [torch.randn(200, heads, 80, generator=generator) for heads in (6, 3, 3)]
    attention, shape = KINDS["compiled-fast"], Shape(6, 3, 80)
    whole = run_plan(attention, [sequence], shape, [{0: 200}], 16, random.Random(0))
    for page_len in (32, 48, 64, 80, 128, 256):
        plan = [{0: 99}, {0: 1}, {0: 100}]
        parts = run_plan(attention, [sequence], shape, plan, page_len, random.Random(1))
        assert same_bits(parts[0], whole[0]), f"page_len {page_len}"


@MODES
@FORMS
@pytest.mark.parametrize("case", [BASE, replace(BASE, num_tokens=(9, 2, 17), head_dim=80)], ids=str)
def test_columns_of_a_wider_tensor_are_the_tensor(case: Case, name: str, exact: bool) -> None:
    """A layer cuts q, k and v out of one projection; how far apart their tokens lie changes no bit."""
    step = make_step(case)
    qkv = step[:3]
    edge = torch.full((len(qkv[0]), 5), torch.nan)
    wide = torch.cat([edge, *(x.flatten(1) for x in qkv), edge], dim=1)
    cuts = wide[:, 5:-5].split([x[0].numel() for x in qkv], dim=1)
    columns = [cut.unflatten(1, x.shape[1:]) for cut, x in zip(cuts, qkv, strict=True)]
    crossed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv]  # a head's tokens side by side
    expected = copy(step)
    o = form(ATTENTION, name)(*expected, exact, 0)
    for inputs in (columns, crossed):
        mine = [*inputs, *copy(step[3:])]
        assert same_bits(form(ATTENTION, name)(*mine, exact, 0), o)
        assert all(same_bits(a, b) for a, b in zip(mine[3:5], expected[3:5], strict=True))


@pytest.mark.parametrize(
    "argument,name",
    [
        *((argument, "torch") for argument in range(3)),
        *(pytest.param(argument, "compiled", marks=needs_numba) for argument in range(3)),
    ],
)
def test_nan_comes_out_as_nan(argument: int, name: str) -> None:
    """A row whose every query, key or value was poison must not come out as zeros."""
    step = make_step(replace(BASE, kv_lens=(1, 70), num_tokens=(1, 1)))
    step[argument][0] = torch.nan
    o = form(ATTENTION, name)(*step, False, 0)
    assert o[0].isnan().all() and o[1].isfinite().all()


@needs_numba
@pytest.mark.parametrize("what", ["page id", "stale page id", "position", "no table", "tokens"])
def test_what_is_not_there_is_refused_before_it_is_read(what: str) -> None:
    """Compiled code has no bounds of its own: a page id that is off would be somebody else's memory."""
    step = make_step(BASE)
    match what:
        case "page id":
            step[5][0, 0] = 10**7
        case "stale page id":
            step[5][2, 1] = len(step[3])
        case "position":
            step[7][1] = 10**6
        case "no table":
            step[5] = step[5][:, :0]
        case "tokens":
            step[6][-1] += 1
    with pytest.raises(IndexError, match="attention: "):
        form(ATTENTION, "compiled")(*step, False, 0)
