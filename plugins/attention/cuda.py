"""Causal attention over pages on CUDA: how kernels are cut and launched. triton.py says how they compute, and
gluon.py how rows of many queries do on sm_90, with the same bits."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from hemiola.plugins.attention.pages import CENTRES, CODES, bits_of
from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.device import Gpu, gpu_of
from hemiola.plugins.gpu.dtypes import ENGINES
from hemiola.plugins.gpu.launch import CLEAR_TOKENS, Block, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import Size, Variant, around, powers

_write = Kernel("attention", "_write")
_attend = Kernel("attention", "_attend")
_join = Kernel("attention", "_join")
_prompt = Kernel("attention", "_prompt")
pack = Kernel("attention", "pack")

GROUP = 1024  # keys; part of the numerics, like TILE
TILE = 64
FP32_GROUP, FP32_TILE = 256, 16  # of engines in fp32, whose products are in registers
PART = 64  # of a head's depth that a program joins
WIDE_SHARED = 110_000  # bytes: 64 queries of 256 fit
DEEP_SHARED = 210_000  # bytes: 16 queries and three tiles of 256 fit
FEW = 2  # rows
_LOG2_E = 1.4426950408889634
_PARTIAL_NUMBERS = 2**25  # of fp32 that pieces may take; rows beyond walk their groups
PROMPT = 128  # queries that gluon.py has at once
PROMPT_STAGES = {256: 2, 128: 4}  # tiles of keys on their way there, by the depth of heads
PROMPT_DEPTHS = (128, 256)  # of heads: what was measured
DRAFTED = 8  # tokens of a row beside prompts that one tile holds
_ALL = 2**31 - 1


class TilePlan(NamedTuple):
    """How a launch is cut; bits do not depend on it."""

    queries: int  # rows (token, head of the group) of a tile
    stages: int  # tiles of keys on their way
    warps: int
    programs: int  # per multiprocessor
    enough: int = 132  # groups of keys; fewer of them are cut into tiles
    prompts: bool = False  # rows of more queries than a tile's are gluon.py's


FP32 = TilePlan(16, 1, 4, 2)  # of engines in fp32, likewise


def choose(
    num_tokens: int, num_rows: int, per_group: int, depth: int, bits: int, gpu: Gpu, prompts: bool = False
) -> TilePlan:
    """Query tiles as high as an average row, if a block has shared memory for them.

    Where gluon.py can take prompts, tiles are for the rows beside them; but a row of one tile can be in
    pieces, and has it where the average row is no prompt. `bits` of narrow pages, else 0. With these a
    layer's tiles stay on one side of the 64 rows from which wgmma takes over: there their products are added
    in another order. Of 3 bits Triton compiles no such tiles. With two stages a tile's keys are asked for
    when those before were used; tiles of codes are too small to fill that wait.
    """
    average = cdiv(num_tokens, max(num_rows, 1)) * per_group
    wanted = max(pow2(average), 16)
    if prompts and wanted > 64 and num_tokens * per_group > PROMPT:
        if average <= PROMPT:
            return choose(num_tokens, num_rows, per_group, depth, bits, gpu)._replace(prompts=True)
        drafted = num_rows * max(min(DRAFTED, 64 // per_group), 1)
        return choose(drafted, num_rows, per_group, depth, bits, gpu)._replace(prompts=True)
    stages = 3 if depth <= 128 else 2
    if bits:
        queries = 64 if per_group >= 16 and bits != 3 else min(wanted, 32)
    elif wanted > 64 and gpu.capability == 90:
        return TilePlan(128, stages, 8, 1)
    elif depth > 128 and gpu.shared < WIDE_SHARED:
        queries = min(wanted, 32)
    else:
        queries = min(wanted, 64)
    if bits in CENTRES and queries < 64 and gpu.shared >= DEEP_SHARED:
        stages = 5 if depth <= 128 else 3 if queries == 16 else 2  # two programs fit a multiprocessor
    if num_rows <= FEW and queries == 16 and gpu.shared >= DEEP_SHARED:
        return TilePlan(queries, 5 if bits in CENTRES else 3, 4, 1)  # one stream of keys a multiprocessor
    if (queries, depth) == (64, 128) and not bits:
        stages = 2  # with three, 133 KB: one program a multiprocessor
    return TilePlan(queries, stages, 4, 2)


def attention(
    q: torch.Tensor,  # [T, H, D] bf16 or fp32
    k: torch.Tensor,  # [T, G, D] like q
    v: torch.Tensor,  # [T, G, D] like q
    k_pages: torch.Tensor,  # [Z, L, G, A], written; see pages.py
    v_pages: torch.Tensor,  # [Z, L, G, B], written
    page_table: torch.Tensor,  # [N, W] int32
    rows: torch.Tensor,  # [N, 8] int32
    positions: torch.Tensor,  # [T] int32
    scale: float,
    first: int,
    k_scale: float,  # a page of 8 bits holds k / k_scale
    v_scale: float,
    plan: TilePlan | None = None,  # free: bits do not depend on it
) -> torch.Tensor:
    """o[T, H, D]; writes k and v to their pages first; see reference.py."""
    (num_tokens, heads, depth), groups = q.shape, k.shape[1]
    (num_pages, page_len), num_rows = k_pages.shape[:2], rows.shape[0]
    kinds = (q.dtype, torch.float8_e4m3fn, CODES)
    device = q.device
    check("attention", "q", q, (num_tokens, heads, depth), ENGINES, device, apart=1)
    check("attention", "k", k, (num_tokens, groups, depth), q.dtype, device, apart=1)
    check("attention", "v", v, (num_tokens, groups, depth), q.dtype, device, apart=1)
    check("attention", "k_pages", k_pages, (num_pages, page_len, groups, None), kinds, device)
    check("attention", "v_pages", v_pages, (num_pages, page_len, groups, None), kinds, device)
    k_bits = bits_of("key", k_pages.dtype, k_pages.shape[3], depth)
    v_bits = bits_of("value", v_pages.dtype, v_pages.shape[3], depth)
    bits = dict(K_BITS=k_bits % 8, V_BITS=v_bits % 8)  # of codes: kernels see by its dtype what is e4m3
    check("attention", "page_table", page_table, (num_rows, page_table.shape[1]), torch.int32, device)
    check("attention", "rows", rows, (num_rows, 8), torch.int32, device)
    check("attention", "positions", positions, (num_tokens,), torch.int32, device)
    if depth not in (16, 32, 64, 128, 256) or heads % groups or page_len % 16:
        raise ValueError(f"attention: heads of {depth}, {heads} of {groups} groups, pages of {page_len}")
    group, tile = (FP32_GROUP, FP32_TILE) if q.dtype is torch.float32 else (GROUP, TILE)
    plan = plan or _plan_of(q, k_pages, num_rows, min(k_bits, v_bits))
    o = torch.empty((num_tokens, heads, depth), dtype=q.dtype, device=device)
    sizes = dict(G=groups, R=heads // groups, D=depth, L=page_len, N_ROWS=max(16, pow2(num_rows)))
    sizes |= dict(enable_fp_fusion=False)
    pages, table_len = (k_pages, v_pages, page_table), page_table.shape[1]
    _write[(cdiv(num_tokens, CLEAR_TOKENS) * 2,)](
        k, v, *pages, rows, positions, o, k_scale, v_scale, num_rows, num_tokens, table_len, k.stride(0),
        v.stride(0), **sizes, **bits, num_warps=4,
    )  # fmt: skip
    if any(bits.values()):
        q, scale = _coded(q, k, v, pages, rows, positions, scale, bits)
    if plan.prompts:
        _attend_prompts(q, *pages, rows, o, scale * k_scale, v_scale, first, plan)
        if num_rows == 1:
            return o
    limit = plan.queries if plan.prompts else _ALL
    most_pieces = num_rows * cdiv(table_len * page_len, group)
    enough = cdiv(plan.enough, groups) * (group // tile)
    capacity = min(max(most_pieces, enough), _PARTIAL_NUMBERS // (groups * plan.queries * depth))
    partial = q.new_empty(capacity * groups * plan.queries * (depth + 2), dtype=torch.float32)
    items = groups * (most_pieces + enough + cdiv(num_tokens * heads // groups, plan.queries) + num_rows)
    tiles = dict(BM=plan.queries, GROUP=group, TILE=tile)
    _attend[(min(items, plan.programs * _multiprocessors(device)),)](
        q, *pages, rows, o, partial, scale * k_scale * _LOG2_E, v_scale, first, num_rows, table_len, limit,
        capacity, plan.enough, q.stride(0), **sizes, **tiles, **bits, num_warps=plan.warps,
        num_stages=plan.stages,
    )  # fmt: skip
    part, per_group = min(PART, depth), heads // groups
    few = min(num_tokens, num_rows * (plan.queries // per_group))  # tokens of rows in pieces
    if few and capacity > 1 and table_len * page_len > tile:
        numbers = pow2(per_group) * part
        _join[(few * groups * (depth // part),)](
            rows, o, partial, v_scale, num_rows, limit, capacity, plan.enough, **sizes, **tiles, PART=part,
            num_warps=min(max(numbers // 128, 1), 8), maxnreg=128,
        )  # fmt: skip
    return o


def _coded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    bits: dict[str, int],
) -> tuple[torch.Tensor, float]:
    """Writes codes; queries turned like the keys, if these have codes, and the scale of what is turned."""
    (num_tokens, heads, depth), groups, page_len = q.shape, k.shape[1], pages[0].shape[1]
    turns = bits["K_BITS"] > 0
    turned = torch.empty((num_tokens, heads, depth), dtype=torch.float32, device=q.device) if turns else q
    parts = (heads + groups if turns else 0) + (groups if bits["V_BITS"] else 0)
    pack[(num_tokens * parts,)](
        q, k, v, *pages, rows, positions, turned, len(rows), num_tokens, pages[2].shape[1], q.stride(0),
        k.stride(0), v.stride(0), G=groups, R=heads // groups, D=depth, L=page_len, **bits,
        LOG_D=depth.bit_length() - 1, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return turned, scale * depth**-0.5 if turns else scale


def _plan_of(q: torch.Tensor, k_pages: torch.Tensor, num_rows: int, bits: int) -> TilePlan:
    if q.dtype is torch.float32:
        return FP32
    (num_tokens, heads, depth), (page_len, groups) = q.shape, k_pages.shape[1:3]
    gpu = gpu_of(q.device)
    boxed = page_len % TILE == 0 and not bits and q.device.type != "cpu"  # there it would be interpreted
    prompts = boxed and gpu.capability == 90 and depth in PROMPT_DEPTHS
    return choose(num_tokens, num_rows, heads // groups, depth, bits, gpu, prompts)


def _attend_prompts(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    o: torch.Tensor,
    scale: float,
    v_scale: float,
    first: int,
    plan: TilePlan,
) -> None:
    """Of rows that have more queries than a tile; one that is alone, of however many."""
    (num_tokens, heads, depth), (page_len, groups), num_rows = q.shape, k_pages.shape[1:3], rows.shape[0]
    k_lines, v_lines = (pages.view(-1, groups * depth) for pages in (k_pages, v_pages))
    limit = 0 if num_rows == 1 else plan.queries
    items = groups * (cdiv(num_tokens * heads // groups, PROMPT) + num_rows)
    _prompt[(min(items, _multiprocessors(q.device)),)](
        q, Block(k_lines, (TILE, depth)), Block(v_lines, (TILE, depth // 2)), page_table, rows, o,
        scale * _LOG2_E, v_scale, num_rows, page_table.shape[1], limit, q.stride(0), G=groups,
        R=heads // groups, D=depth, L=page_len, FIRST=max(first, 0), STAGES=PROMPT_STAGES[depth],
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def variants(largest: Size, *arguments: torch.Tensor | float) -> Iterator[Variant]:
    """Tables of rows have powers of two, query tiles the height of an average row."""
    for rows in around(powers(largest.rows), largest.rows):
        for tokens in around((rows * each for each in powers(64)), largest.tokens):
            for pages in (1, largest.pages):
                yield Variant(Size(tokens, rows, pages))


def ahead(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor,
    v_pages: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor, *rest: torch.Tensor | float,
) -> Iterator[dict[str, TilePlan]]:  # fmt: skip
    """The plan of the largest step, then lower tiles, which need less shared memory."""
    (num_tokens, heads, depth), groups = q.shape, k.shape[1]
    plan = choose(num_tokens, len(rows), heads // groups, depth, 0, gpu)
    for queries in (64, 32, 16):
        if queries <= plan.queries:
            yield {"plan": plan._replace(queries=queries, warps=4, programs=2)}


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return 2 if device.type == "cpu" else gpu_of(device).multiprocessors  # 2: interpreted
