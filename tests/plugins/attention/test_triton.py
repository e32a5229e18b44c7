"""attention on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import random
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from kit.gpu_steps import rows_of, same_bits
from kit.ops import rel_error

from hemiola.plugins.attention import reference
from hemiola.plugins.attention.pages import FORMATS
from hemiola.plugins.spec import E4M3

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"
SM_90 = CUDA and torch.cuda.get_device_capability() == (9, 0)


def kernels() -> ModuleType:
    from hemiola.plugins.attention import cuda

    return cuda


@dataclass(frozen=True)
class Case:
    heads: int = 8
    groups: int = 2
    depth: int = 128
    page_len: int = 64
    first: int = 0
    kv: str = "auto"  # what pages hold
    dtype: torch.dtype = torch.bfloat16
    plan: tuple[int, ...] | None = None

    def pools(self, num: int) -> list[torch.Tensor]:
        """So many pages for keys and for values, full of NaN."""
        pools, form = [], FORMATS[self.kv]
        for width, dtype in zip(form.widths(self.depth), form.dtypes(self.dtype), strict=True):
            size = num * self.page_len * self.groups * width * dtype.itemsize
            raw = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
            pools.append(raw.view(dtype).view(num, self.page_len, self.groups, width))
        return pools

    def tokens(self, num: int) -> list[torch.Tensor]:
        wide = torch.randn(num, (self.heads + 2 * self.groups) * self.depth, device=DEVICE).to(self.dtype)
        sizes = [self.heads * self.depth, self.groups * self.depth, self.groups * self.depth]
        return [part.unflatten(1, (-1, self.depth)) for part in wide.split(sizes, 1)]

    @property
    def numbers(self) -> tuple[float, ...]:
        """What a call ends with: scale, first, k_scale and v_scale."""
        return (self.depth**-0.5, self.first, *((0.02, 0.03) if self.kv == "fp8" else (1.0, 1.0)))

    def call(
        self, tokens: list, pools: list, table: torch.Tensor, rows: list, positions: list
    ) -> torch.Tensor:
        at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        plan = kernels().TilePlan(*self.plan) if self.plan else None
        rows = rows_of(*rows, device=DEVICE)
        return kernels().attention(*tokens, *pools, table, rows, at, *self.numbers, plan=plan)


def plain_run(case: Case, tokens: list[torch.Tensor]) -> torch.Tensor:
    """One call with all tokens, pages in order."""
    length = tokens[0].shape[0]
    num = -(-length // case.page_len)
    table = torch.arange(1, num + 1, dtype=torch.int32, device=DEVICE).view(1, -1)
    pools = case.pools(num + 1)
    return case.call(tokens, pools, table, [(0, length, 0, 1, 0, 0, 0, 0)], list(range(length)))


def truth(case: Case, tokens: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = (t.double() for t in tokens)
    if case.kv != "auto":
        k, v = kept(case, tokens)
    k, v = (t.repeat_interleave(case.heads // case.groups, 1) for t in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * case.depth**-0.5
    at = torch.arange(q.shape[0], device=q.device)
    hidden = (at[None, :] > at[:, None]) | (at < case.first)[None, :]
    return torch.einsum("hts,shd->thd", score.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(), v)


def kept(case: Case, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Keys and values as reference.py stores and loads them, one page for all; on the CPU, which divides."""
    found, form = [], FORMATS[case.kv]
    kinds = zip(form.widths(case.depth), form.dtypes(case.dtype), case.numbers[2:], strict=True)
    for part, x, (width, dtype, scale) in zip(("key", "value"), tokens[1:], kinds, strict=True):
        page = torch.zeros(-(-len(x) // 16) * 16, case.groups, width, dtype=dtype)
        for place, one in enumerate(x.cpu()):
            reference.store(part, page, place, one, scale)
        found.append(reference.load(part, page, case.depth, scale, torch.float64)[: len(x)].to(DEVICE))
    return found


def storm(case: Case, lengths: tuple[int, ...], seed: int, longest: int) -> None:
    """Random steps of several sequences over shuffled pages; raises where a bit is not the plain run's."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences = [case.tokens(length) for length in lengths]
    plains = [plain_run(case, tokens) for tokens in sequences]
    width = -(-(max(lengths) + 8) // case.page_len) + 1
    table = torch.randperm(len(lengths) * width, device=DEVICE).int().view(len(lengths), width) + 1
    pools = case.pools(len(lengths) * width + 1)
    committed = [0] * len(lengths)
    while any(c < length for c, length in zip(committed, lengths, strict=True)):
        parts, rows, positions, chosen, checks, dead = [], [], [], [], [], []
        for n in rng.sample(range(len(lengths)), len(lengths)):
            left = lengths[n] - committed[n]
            if left == 0 or rng.random() < 0.2:
                gap = rng.randint(0, 3)
                dead += range(len(positions), len(positions) + gap)
                rows.append((len(positions), gap, 0, 0, rng.randint(0, 9), 0, 0, 0))
                parts.append(case.tokens(gap))
                positions += [10**6] * gap
                chosen.append(n)
                continue
            certain = min(left, rng.choice((1, 1, rng.randint(1, longest))))
            drafts = rng.randint(0, 7) if certain == 1 else 0
            good = certain + min(rng.randint(0, drafts), left - certain)
            at = committed[n]
            checks.append((n, at, good, len(positions)))
            rows.append((len(positions), certain + drafts, drafts, n + 1, at, 0, 0, 0))
            parts += [[t[at : at + good] for t in sequences[n]], case.tokens(certain + drafts - good)]
            positions += range(at, at + certain + drafts)
            chosen.append(n)
            committed[n] += good
        if not positions:
            continue
        tokens = [torch.cat([part[i] for part in parts]) for i in range(3)]
        o = case.call(tokens, pools, table[chosen].contiguous(), rows, positions)
        assert (o[dead] == 0).all(), "tokens of no live row are not zero"
        for n, at, good, start in checks:
            same_bits(
                o[start : start + good], plains[n][at : at + good], f"seed {seed}: sequence {n} from {at}"
            )


CASES = {
    "base": Case(),
    "no groups": Case(heads=4, groups=4),
    "5 of a group": Case(heads=10, groups=2),
    "16 of a group": Case(heads=32, groups=2),
    "32 of a group": Case(heads=32, groups=1),
    "depth 16": Case(depth=16),
    "depth 64": Case(depth=64),
    "depth 256": Case(depth=256),
    "pages of 16": Case(page_len=16),
    "pages of 48": Case(page_len=48),
    "from 1 on": Case(first=1),
    "from 70 on": Case(first=70),
    "fp8": Case(kv="fp8"),
    "fp8, 16 of a group": Case(kv="fp8", heads=32),
    "fp8, depth 256": Case(kv="fp8", depth=256),
    "k8v4": Case(kv="turboquant_k8v4"),
    "4 bits": Case(kv="turboquant_4bit_nc"),
    "4 bits, 16 of a group": Case(kv="turboquant_4bit_nc", heads=32),
    "4 bits, depth 256": Case(kv="turboquant_4bit_nc", depth=256),
    "4 bits, depth 64, from 1 on": Case(kv="turboquant_4bit_nc", depth=64, first=1),
    "4 bits, pages of 48": Case(kv="turboquant_4bit_nc", page_len=48),
    "k3v4": Case(kv="turboquant_k3v4_nc"),
    "3 bits": Case(kv="turboquant_3bit_nc"),
    "3 bits, depth 256": Case(kv="turboquant_3bit_nc", depth=256),
    "3 bits, depth 16": Case(kv="turboquant_3bit_nc", depth=16),
    "3 bits, 16 of a group": Case(kv="turboquant_3bit_nc", heads=32),
    "k8v4, 16 of a group, depth 256": Case(kv="turboquant_k8v4", heads=16, groups=1, depth=256),
}
FP32 = {
    "fp32": Case(dtype=torch.float32),
    "fp32, depth 256": Case(dtype=torch.float32, depth=256),
    "fp32, 16 of a group": Case(dtype=torch.float32, heads=32),
    "fp32, 32 of a group": Case(dtype=torch.float32, heads=32, groups=1, depth=64),
    "fp32 over pages of e4m3": Case(dtype=torch.float32, kv="fp8"),
    "fp32 over 4 bits": Case(dtype=torch.float32, kv="turboquant_4bit_nc"),
}
LENGTHS = (1300, 700, 513, 64, 5)


@pytest.mark.parametrize("case", (CASES | FP32).values(), ids=(CASES | FP32).keys())
def test_every_cut_has_the_plain_bits(case: Case, poisoned_empty: None) -> None:
    storm(case, LENGTHS, seed=3, longest=400)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_errs_no_more_than_bf16_weights(case: Case) -> None:
    torch.manual_seed(0)
    tokens = case.tokens(700)
    assert rel_error(plain_run(case, tokens), truth(case, tokens)) < 4e-3


@pytest.mark.parametrize("case", FP32.values(), ids=FP32.keys())
def test_fp32_errs_no_more_than_sums_in_another_order(case: Case) -> None:
    torch.manual_seed(0)
    tokens = case.tokens(700)
    assert rel_error(plain_run(case, tokens), truth(case, tokens)) < 1e-6


PLANS = {
    "one warp": (16, 1, 1, 1),
    "16 queries": (16, 3, 4, 2),
    "32 queries": (32, 2, 2, 3),
    "64 queries": (64, 2, 4, 1),
    "128 queries": (128, 2, 8, 1),
    "groups for a few programs": (16, 2, 4, 2, 0),
    "tiles for many programs": (16, 2, 4, 2, 10**6),
    "prompts by gluon.py": (32, 2, 4, 2, 132, True),
}


@pytest.mark.parametrize("name", [name for name in PLANS if name != "prompts by gluon.py"])
@pytest.mark.parametrize("kv", ["fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("depth", [128, 256])
def test_tiles_over_narrow_pages_leave_the_bits_alone(depth: int, kv: str, name: str) -> None:
    """A layer's tiles stay on one side of 64 queries, from which on products are added in another order."""
    if kv != "fp8" and PLANS[name][0] >= 64:
        pytest.skip("never chosen beside lower ones (test_plans.py)")
    torch.manual_seed(0)
    case, tokens = Case(depth=depth, kv=kv), Case(depth=depth).tokens(1300)
    plain = replace(case, plan=PLANS["64 queries"]) if PLANS[name][0] >= 64 else case
    same_bits(plain_run(replace(case, plan=PLANS[name]), tokens), plain_run(plain, tokens), "outputs")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("depth", [128, 256])
def test_tiles_leave_the_bits_alone(depth: int, plan: tuple[int, ...]) -> None:
    if plan == PLANS["prompts by gluon.py"] and not SM_90:
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    tokens = Case(depth=depth).tokens(2600)
    same_bits(
        plain_run(Case(depth=depth, plan=plan), tokens), plain_run(Case(depth=depth), tokens), "outputs"
    )
    storm(Case(depth=depth, plan=plan), (1100, 30), seed=4, longest=300)


@pytest.mark.parametrize("case", [Case(first=1, kv=kv) for kv in FORMATS], ids=FORMATS)
def test_what_nobody_wrote_before_the_first_place_makes_no_nan(case: Case) -> None:
    """An MTP head has no entry at place 0: on fresh memory it computed NaN."""
    tokens, table = case.tokens(700), torch.arange(1, 12, dtype=torch.int32, device=DEVICE).view(1, -1)
    pools = case.pools(12)
    later = [t[1:] for t in tokens]
    o = case.call(later, pools, table, [(0, 699, 0, 1, 1, 0, 0, 0)], list(range(1, 700)))
    same_bits(o, plain_run(case, tokens)[1:], "outputs")


def test_pages_of_e4m3_hold_what_torch_rounds_to() -> None:
    """All of bf16, as keys and as values: beyond what pages hold, subnormal, ties, NaN."""
    case = Case(heads=2, groups=1, kv="fp8")
    every = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(-1, 1, 128)
    num = len(every)
    table = torch.arange(1, num // 64 + 1, dtype=torch.int32, device=DEVICE).view(1, -1)
    pools, q = case.pools(num // 64 + 1), every.repeat(1, 2, 1)
    case.call([q, every, every], pools, table, [(0, num, 0, 1, 0, 0, 0, 0)], list(range(num)))
    for pool, scale in zip(pools, case.numbers[2:], strict=True):
        units = every.cpu().float() / scale
        wanted, found = units.clamp(-448, 448).to(E4M3), pool[1:].cpu().view(-1, 1, 128)
        assert torch.equal(found.float().isnan(), units.isnan())
        there = ~units.isnan()
        assert torch.equal(found.view(torch.uint8)[there], wanted.view(torch.uint8)[there])


@pytest.mark.parametrize("kv", [kv for kv in FORMATS if kv.startswith("turboquant")])
@pytest.mark.parametrize("depth", [16, 64, 128, 256])
def test_pages_of_codes_hold_the_references_bytes(depth: int, kv: str) -> None:
    """Tokens of every size, zeros, and equal numbers; what a page has is the same on CPUs and GPUs."""
    case, num = Case(heads=2, groups=2, depth=depth, kv=kv), 130
    torch.manual_seed(depth)
    tokens = case.tokens(num)
    for x in tokens[1:]:
        x *= torch.logspace(-4, 3, num, device=DEVICE).to(x.dtype)[:, None, None]
        x[5], x[6] = 0, 3
    table = torch.arange(1, 4, dtype=torch.int32, device=DEVICE).view(1, -1)
    pools = case.pools(4)
    wanted = [pool.cpu().clone() for pool in pools]
    case.call(tokens, pools, table, [(0, num, 0, 1, 0, 0, 0, 0)], list(range(num)))
    for part, pages, x in zip(("key", "value"), wanted, tokens[1:], strict=True):
        for place, one in enumerate(x.cpu()):
            reference.store(part, pages[1 + place // 64], place % 64, one, 1.0)
    for pool, own in zip(pools, wanted, strict=True):
        assert torch.equal(pool.cpu().view(torch.uint8), own.view(torch.uint8))


def test_rows_beyond_the_space_for_pieces_walk_their_groups() -> None:
    module = kernels()
    before = module._PARTIAL_NUMBERS
    module._PARTIAL_NUMBERS = 16 * 128 * 2 * 20
    try:
        storm(Case(), LENGTHS, seed=5, longest=300)
    finally:
        module._PARTIAL_NUMBERS = before


def test_queries_of_a_row_further_apart_than_32_bits() -> None:
    """From 200,000 tokens on, 10,240 numbers each, a row's own queries were looked for at negative places."""
    case, num, far = Case(), 140, 2**24
    near = case.tokens(num)
    wide = torch.empty(num, far, dtype=torch.bfloat16, device=DEVICE)[:, : (8 + 2 * 2) * 128]
    apart = [part.unflatten(1, (-1, 128)) for part in wide.split([8 * 128, 2 * 128, 2 * 128], 1)]
    for to, part in zip(apart, near, strict=True):
        to.copy_(part)
    same_bits(plain_run(case, apart), plain_run(case, near), "outputs")


PROMPTS = {
    "9B": Case(heads=16, groups=4, depth=256),
    "no groups": Case(heads=2, groups=2, depth=256),
    "5 of a group": Case(heads=10, groups=2, depth=256),
    "16 of a group": Case(heads=16, groups=1, depth=256),
    "pages of 128": Case(heads=8, groups=2, depth=256, page_len=128),
    "from 1 on": Case(heads=8, groups=2, depth=256, first=1),
    "from 70 on": Case(heads=8, groups=2, depth=256, first=70),
    "Nano-9B": Case(heads=40, groups=8),
    "30B-A3B": Case(heads=32, groups=2),
    "depth 128, from 1 on": Case(heads=8, groups=2, page_len=128, first=1),
}
ALONE = [[(num, at, 1)] for num in (1, 65, 128, 129, 640, 1025, 2100) for at in (0, 3, 64, 640)]
TOGETHER = [  # tokens, committed, slot
    [(640, 0, 1), (1025, 640, 2)],
    [(1, 700, 1), (300, 3, 2), (4, 64, 3), (1, 2000, 4), (4, 0, 5)],
    [(500, 0, 1), (0, 33, 2), (77, 9, 0), (4, 130, 3), (0, 0, 0), (129, 64, 4), (33, 1030, 5)],
]
MANY = [(1, 300 + 7 * n, n + 1) for n in range(40)] + [(700, 100, 41)] + [(4, 60, 42 + n) for n in range(20)]
OTHERS = ((128, 2, 8, 1), PLANS["prompts by gluon.py"], PLANS["prompts by gluon.py"])  # twice: races


def check_prompts(case: Case, parts: list[tuple[int, int, int]], plans: tuple = OTHERS) -> None:
    """gluon.py's bits are triton.py's; NaN in all memory that nobody wrote."""
    rows, positions = [], []
    for num, at, slot in parts:
        rows.append((len(positions), num, 0, slot, at, 0, 0, 0))
        positions += range(at, at + num)
    tokens, page_len = case.tokens(len(positions)), case.page_len
    width = max(-(-(num + at) // page_len) for num, at, _ in parts) + 1
    table = torch.randperm(len(parts) * width, device=DEVICE).int().view(-1, width) + 1
    pools = case.pools(len(parts) * width + 1)
    for (_, at, _), pages in zip(parts, table.long(), strict=True):
        place = torch.arange(min(case.first, at), at, device=DEVICE)
        for pool in pools:
            there = torch.randn(len(place), case.groups, case.depth, device=DEVICE)
            pool[pages[place // page_len], place % page_len] = there.to(pool.dtype)
    outputs, written = [], []
    for plan in plans:
        own = [pool.clone() for pool in pools]
        outputs.append(replace(case, plan=plan).call(tokens, own, table, rows, positions))
        written.append(torch.stack(own).view(torch.int16))
    for output, pages in zip(outputs[1:], written[1:], strict=True):
        same_bits(output, outputs[0], f"{case}: outputs of {parts[:4]}")
        assert torch.equal(pages, written[0])


@pytest.mark.skipif(not SM_90, reason="needs sm_90")
@pytest.mark.parametrize("case", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("steps", [ALONE, TOGETHER], ids=["alone", "together"])
def test_prompts_have_the_same_bits_from_both_kernels(steps: list, case: Case, poisoned_empty: None) -> None:
    torch.manual_seed(0)
    for parts in steps:
        check_prompts(case, parts)


@pytest.mark.skipif(not SM_90, reason="needs sm_90")
@pytest.mark.parametrize("case", ["9B", "from 70 on"])
def test_a_prompt_among_many_rows_has_the_same_bits_from_both_kernels(
    case: str, poisoned_empty: None
) -> None:
    torch.manual_seed(0)
    check_prompts(PROMPTS[case], MANY, (*OTHERS, None))
    check_prompts(PROMPTS[case], [(640, 3, 1)], (*OTHERS, None))


@pytest.mark.skipif(not SM_90, reason="needs sm_90")
@pytest.mark.parametrize("case", ["no groups", "depth 128, from 1 on"])
def test_few_programs_go_from_item_to_item(
    case: str, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of long prompts do; as many as compute-sanitizer can watch (scripts/gpu_sanitize.py)."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels(), "_multiprocessors", lambda device: 3)
    check_prompts(PROMPTS[case], [(300, 3, 1), (1, 200, 2), (150, 70, 3)])
