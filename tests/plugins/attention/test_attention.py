"""Paged attention against its reference and torch's SDPA, and against itself under every split."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from kit.ops import SUBJECTS, Subject, form, int32, rel_error, row, same_bits

from hemiola.plugins import OPS
from hemiola.plugins.attention.compiled import QUERIES
from hemiola.plugins.attention.spans import FEW, SPAN
from hemiola.plugins.cpu import kernel
from hemiola.plugins.cpu.simd import LANES
from hemiola.plugins.spec import E4M3

FORMS = pytest.mark.parametrize("name", ["reference", "compiled"])
STALE = 10**6  # in the page table behind a row's pages: no page


@dataclass(frozen=True)
class Case:
    """A step; every list has one entry per row."""

    kv_lens: tuple[int, ...] = (70, 3, 129)
    num_tokens: tuple[int, ...] = (1, 1, 1)
    heads: int = 8
    groups: int = 2
    head_dim: int = 64
    page_len: int = 16
    spare_width: int = 0  # stale columns of the page table
    first: int = 0
    kept: torch.dtype = torch.float32  # of pages

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in self.__dict__.items() if value != getattr(Case, name)]
        return ",".join(changed).replace(" ", "") or "base"


BASE = Case()
CASES = [
    BASE,
    *(replace(BASE, heads=h, groups=g) for h, g in ((1, 1), (4, 4), (6, 2), (32, 2), (32, 1))),
    *(replace(BASE, head_dim=head_dim) for head_dim in (16, 80, 256)),
    *(replace(BASE, page_len=page_len) for page_len in (32, 48, 128)),
    replace(BASE, spare_width=3),
    replace(BASE, kv_lens=(1,), num_tokens=(1,)),
    replace(BASE, kv_lens=(64, 64), num_tokens=(1, 1)),
    replace(BASE, kv_lens=(2500, 5, 2490), num_tokens=(1, 1, 1)),
    replace(BASE, num_tokens=(8, 0, 2)),
    replace(BASE, num_tokens=(9, 2, 17)),
    replace(BASE, kv_lens=(20, 150), num_tokens=(20, 150)),
    replace(BASE, kv_lens=(300, 66, 40), num_tokens=(140, 1, 0)),
    replace(BASE, kv_lens=(5, 5), num_tokens=(0, 0)),
    replace(BASE, first=1),
    replace(BASE, first=1, kv_lens=(70, 2, 33), num_tokens=(69, 1, 17)),
    replace(BASE, first=65, kv_lens=(70, 66, 129), num_tokens=(3, 1, 64)),
    replace(BASE, kept=E4M3),
    replace(BASE, kept=E4M3, kv_lens=(2500, 5, 300), num_tokens=(2, 0, 140), head_dim=256),
    replace(BASE, kept=E4M3, first=65, kv_lens=(70, 66, 129), num_tokens=(3, 1, 64), page_len=48),
]
CASES += [  # on both sides of what the code takes together: QUERIES and FEW of an item, SPAN keys, PANEL
    replace(
        BASE,
        kv_lens=(num, num + 3),
        num_tokens=(num, num - 1),
        heads=groups * copies,
        groups=groups,
        kept=kept,
    )
    for groups, copies in ((2, 1), (1, 4), (1, 65), (1, 7))
    for num in sorted({n // copies + more for n in (FEW, LANES, QUERIES, 2 * QUERIES) for more in (0, 1, 2)})
    for kept in (torch.float32, E4M3)
]
CASES += [
    replace(BASE, kv_lens=(size, 5, size), num_tokens=(1, 5, 2), page_len=page_len, kept=kept)
    for size in (SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 1)
    for page_len in (16, 48, SPAN, 2 * SPAN)
    for kept in (torch.float32, E4M3)
]
CASES += [replace(BASE, kv_lens=(7,) * rows, num_tokens=(3, 1) * (rows // 2)) for rows in (64, 66, 130)]
SCALES = 0.25, 0.0390625  # of e4m3 pages: so some numbers are beyond what these hold


def make_step(case: Case, seed: int = 0) -> list:
    """Arguments. What a row may not read is NaN: free pages, places behind its tokens or before `first`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    widths = [-(-kv_len // case.page_len) for kv_len in case.kv_lens]
    num_pages = sum(widths) + 3
    page_shape = (num_pages, case.page_len, case.groups, case.head_dim)
    k_pages, v_pages = (torch.full(page_shape, torch.nan) for _ in range(2))
    page_table = torch.full((len(widths), max(widths) + case.spare_width), STALE, dtype=torch.int32)
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    positions, rows = [], []
    for n, (kv_len, num_tokens) in enumerate(zip(case.kv_lens, case.num_tokens, strict=True)):
        held = kv_len - num_tokens
        for place in range(widths[n]):
            page_table[n, place] = free.pop()
        places = torch.arange(case.first, max(held, case.first))
        at = page_table[n, places // case.page_len].long(), places % case.page_len
        k_pages[at], v_pages[at] = normal(len(places), *page_shape[2:]), normal(len(places), *page_shape[2:])
        rows.append(row(first=len(positions), num_tokens=num_tokens, slot=n + 1))
        positions += range(held, kv_len)
    q, k, v = (
        normal(len(positions), heads, case.head_dim) for heads in (case.heads, case.groups, case.groups)
    )
    where = [page_table, int32(*rows).view(-1, 8), int32(*positions)]
    scales = SCALES if case.kept is E4M3 else (1.0, 1.0)
    pages = [(p / s).to(case.kept) for p, s in zip((k_pages, v_pages), scales, strict=True)]
    return [q, k, v, *pages, *where, case.head_dim**-0.5, case.first, *scales]


def copy(step: list) -> list:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in step]


def attend(name: str, step: list) -> torch.Tensor:
    return form(OPS["attention"], name)(*step)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_reference(case: Case) -> None:
    """In fp64; both write the same pages, and nothing else."""
    step = make_step(case)
    seen, told = copy(step), copy(step)
    o = attend("compiled", seen)
    told[:5] = [x.double() if x.dtype is torch.float32 else x for x in told[:5]]
    expected = attend("reference", told)
    assert rel_error(o, expected) < 1e-6
    for mine, theirs in zip(seen[:8], told[:8], strict=True):
        assert same_bits(mine, theirs.to(mine.dtype))


@FORMS
@pytest.mark.parametrize("copies", [1, 3, 8, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 40], ids="tokens={}".format)
def test_equals_sdpa(copies: int, num_tokens: int, name: str) -> None:
    """torch's own attention over the same keys in one tensor; fp32 sums in other orders."""
    step = make_step(replace(BASE, kv_lens=(90,), num_tokens=(90,), heads=2 * copies, head_dim=32))
    q, k, v = (x.transpose(0, 1)[None] for x in step[:3])
    words = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=step[8])
    expected, done = words[0].transpose(0, 1), 90 - num_tokens
    for begin, end in ((0, done), (done, 90)):
        line = int32(*row(num_tokens=end - begin))[None]
        part = [*(x[begin:end] for x in step[:3]), *step[3:6], line, step[7][begin:end], *step[8:]]
        torch.testing.assert_close(attend(name, part), expected[begin:end], rtol=1e-5, atol=2e-6)


@FORMS
@pytest.mark.usefixtures("poisoned_empty")
def test_padding_reads_and_writes_nothing(name: str) -> None:
    """Tokens of nobody between the rows, and rows on the dump slot that say anything else."""
    alone = make_step(replace(BASE, kv_lens=(70, 40), num_tokens=(2, 3)))
    step = copy(alone)
    places = torch.tensor([1, 2, 7, 8, 9])
    for index, nobody in ((0, torch.nan), (1, torch.nan), (2, torch.nan), (7, -STALE)):
        wider = step[index].new_full((12, *step[index].shape[1:]), nobody)
        wider[places] = step[index]
        step[index] = wider
    dump = int32(-5, 10**6, 3, 0, -9, 8, 7, 77)
    step[6] = torch.stack([dump, step[6][0], dump, step[6][1]])
    step[6][[1, 3], 0] = int32(1, 7)
    step[5] = torch.full((4, step[5].shape[1]), STALE, dtype=torch.int32)
    step[5][[1, 3]] = alone[5]
    o = attend(name, step)
    expected = attend(name, alone)
    assert same_bits(o[places], expected)
    o[places] = 0
    assert (o == 0).all()
    assert all(same_bits(a, b) for a, b in zip(step[3:5], alone[3:5], strict=True))


@dataclass(frozen=True)
class Shape:
    """What is constant within one engine."""

    heads: int = 8
    groups: int = 2
    head_dim: int = 64
    first: int = 0
    kept: torch.dtype = torch.float32

    def __str__(self) -> str:
        place = f" from {self.first}" if self.first else ""
        return f"heads={self.heads}/{self.groups}x{self.head_dim}{place}" + " e4m3" * (self.kept is E4M3)


SHAPES = [Shape(), Shape(4, 4, 16), Shape(10, 2, 80), Shape(32, 1, 128), Shape(2, 2, 256)]
SHAPES += [Shape(6, 2, 32, first=1), Shape(3, 3, 48, first=70), Shape(8, 2, 80, first=1, kept=E4M3)]
LENGTHS = (1, 15, 64, 129, 70, 333)


def run_plan(
    sequences: list, shape: Shape, plan: list[dict[int, int]], page_len: int, rng: random.Random
) -> list[torch.Tensor]:
    """Outputs per sequence when each step of `plan` brings that many tokens of these sequences."""
    width = max(-(-len(q) // page_len) for q, _, _ in sequences) + rng.randrange(4)
    num_pages = len(sequences) * width + 1
    page = (num_pages, page_len, shape.groups, shape.head_dim)
    pages = [torch.full(page, torch.nan, dtype=shape.kept) for _ in range(2)]
    scales = SCALES if shape.kept is E4M3 else (1.0, 1.0)
    numbers = (shape.head_dim**-0.5, shape.first, *scales)
    table = int32(*rng.sample(range(1, num_pages), num_pages - 1)).view(len(sequences), width)
    done = [0] * len(sequences)
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in plan:
        order = rng.sample(list(step), len(step))
        parts = {index: slice(done[index], done[index] + step[index]) for index in order}
        q, k, v = (torch.cat([sequences[index][i][parts[index]] for index in order]) for i in range(3))
        positions = torch.cat([torch.arange(parts[index].start, parts[index].stop) for index in order]).int()
        first, rows = 0, []
        for index in order:
            rows.append(row(first=first, num_tokens=step[index], slot=index + 1))
            first += step[index]
        chosen = rng.sample(range(len(order)), len(order))  # rows in any order
        lines, lists = int32(*(rows[n] for n in chosen)).view(-1, 8), table[[order[n] for n in chosen]]
        o = attend("compiled", [q, k, v, *pages, lists, lines, positions, *numbers])
        for index, line in zip(order, rows, strict=True):
            outputs[index].append(o[line[0] : line[0] + line[1]])
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_the_own_prefix_only(
    shape: Shape, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random mixtures give every sequence the bits of its own prefill in one step on one thread."""
    generator = torch.Generator().manual_seed(1)
    heads = (shape.heads, shape.groups, shape.groups)
    sequences = [[torch.randn(n, h, shape.head_dim, generator=generator) for h in heads] for n in LENGTHS]
    torch.set_num_threads(1)
    alone = [run_plan([s], shape, [{0: len(s[0])}], 16, random.Random(0))[0] for s in sequences]
    torch.set_num_threads(threads)
    monkeypatch.setattr(kernel, "WORTH_A_THREAD", -1)
    rng, page_len = random.Random(threads), (16, 32, 48, 128)[threads % 4]
    together = run_plan(sequences, shape, random_plan(rng, LENGTHS), page_len, rng)
    for index, (o, expected) in enumerate(zip(together, alone, strict=True)):
        assert same_bits(o, expected), f"sequence {index}, page_len {page_len}, seed {threads}"


@pytest.mark.parametrize("page_len", [16, 48, 80, 256])
def test_page_len_and_decoding_token_by_token_change_no_bit(page_len: int) -> None:
    """48 is a multiple of 16 and no part of a span."""
    generator = torch.Generator().manual_seed(2)
    sequence = [torch.randn(130, heads, 80, generator=generator) for heads in (6, 3, 3)]
    whole = run_plan([sequence], Shape(6, 3, 80), [{0: 130}], 32, random.Random(0))[0]
    for plan in ([{0: 1}] * 130, [{0: 99}, {0: 1}, {0: 30}]):
        assert same_bits(run_plan([sequence], Shape(6, 3, 80), plan, page_len, random.Random(1))[0], whole)


def test_a_query_that_sees_no_key_is_zero() -> None:
    """An MTP head has no pair at place 0: with `first` = 1 there is nothing for that query to see."""
    step = make_step(replace(BASE, first=1, kv_lens=(70, 1, 33), num_tokens=(70, 1, 33)))
    o = attend("compiled", step)
    hidden = step[7] < 1
    assert (o[hidden] == 0).all() and o[~hidden].isfinite().all()


@FORMS
@pytest.mark.parametrize("argument", range(3))
def test_nan_comes_out_as_nan(argument: int, name: str) -> None:
    """A row whose every query, key or value was poison must not come out as zeros."""
    step = make_step(replace(BASE, kv_lens=(1, 70), num_tokens=(1, 1)))
    step[argument][0] = torch.nan
    o = attend(name, step)
    assert o[0].isnan().all() and o[1].isfinite().all()


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_scores_without_bound_do_not_overflow(scale: float) -> None:
    """The highest score takes all; nothing is inf or NaN."""
    step = make_step(replace(BASE, kv_lens=(70, 33), num_tokens=(3, 33)))
    step[8] = scale
    assert attend("compiled", step).isfinite().all()


@pytest.mark.parametrize(
    "what", ["page id", "stale page id", "position", "negative", "no table", "tokens", "before"]
)
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
        case "negative":
            step[7][1] = -1
        case "no table":
            step[5] = step[5][:, :0]
        case "tokens":
            step[6][-1, 1] += 1
        case "before":
            step[6][0, 0] = -1
    with pytest.raises(IndexError, match="attention: "):
        attend("compiled", step)


@pytest.mark.parametrize("subject", SUBJECTS["attention"], ids=str)
def test_tokens_that_attend_have_the_bits_that_they_have_among_all(subject: Subject) -> None:
    """And all tokens are written to their pages."""
    values = subject.arguments(40)
    ids = int32(39, 3, 17, 38)
    some = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    attend = form(OPS["attention"], "compiled")
    every, few = attend(*values), attend(*some, ids)
    assert same_bits(few[ids.long()], every[ids.long()])
    for place in (3, 4):
        assert same_bits(some[place], values[place])
