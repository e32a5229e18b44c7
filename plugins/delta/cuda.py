"""The gated delta rule on CUDA, with a decay per head or per channel (KDA): chunks of the absolute grid.

A chunk with edge state S0 and G = cumsum(g) (arXiv 2412.06464, 2510.26692), absent tokens zeros:
    A_ts = beta_t sum_c k_tc k_sc exp(G_tc - G_sc), s < t;   T = (I + A)^-1 diag(beta)
    P_ts = sum_c q_tc k_sc exp(G_tc - G_sc), s <= t;         M = P T
    o    = (q exp(G) - M (k exp(G))) S0 + M v
    S1   = exp(G_C) S0 + (k exp(G_C - G))' U,   U = T v - T (k exp(G)) S0
What needs no state is computed first, by many small programs (`_weigh`, weights.py). Then an output reads the
state once, through one vector per token (`_step`); a row of many tokens goes on with its state in registers
(`_scan`). Few rows, which wait for launches more than for memory, have one for all (`_few`, few.py). Row
t of T depends on rows up to t only, and bits depend on no layout. Multiply-adds are contracted only where the
source says so.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.dtypes import ENGINES
from hemiola.plugins.gpu.launch import CLEAR_TOKENS, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import Size, Variant, every_number_of_rows
from hemiola.plugins.gpu.tickets import tickets_of

_few = Kernel("delta", "_few")
_weigh = Kernel("delta", "_weigh")
_step = Kernel("delta", "_step")
_scan = Kernel("delta", "_scan")

SHORT = 16  # tokens of a row that is not long
MANY = 528  # programs, four a multiprocessor
FEW_SINGLE, FEW = 32, 4  # rows that have one launch: of a token each, and of more
PLACES = 264  # programs of it, two a multiprocessor


class TilePlan(NamedTuple):
    """How a launch is cut; bits do not depend on it."""

    channels: int  # of V, in a tile
    tiles: int  # of a program of `_step`
    stages: int  # tiles of state on their way
    warps: int
    scan_channels: int
    scan_warps: int
    scan_stages: int  # one less than this of chunks are on their way
    programs: int  # of `_scan`
    weigh_warps: int
    weigh_registers: int  # of a thread at most; 0: as many as it takes
    shares: int  # programs of `_weigh` for the rows whose edge does not stay
    ordered: bool  # rows that pass an edge first, and what a head's tiles then share loaded once
    few: bool = False  # one launch, whose channels, tiles and warps are as of `_step`


# Of engines in fp32, whose products are in registers.
FP32 = TilePlan(16, 1, 1, 8, 16, 8, 1, 264, 8, 0, 132, False)


def choose(num_tokens: int, num_rows: int, heads: int, width: int, decays: int, keys: int) -> TilePlan:
    """Few tiles a program while there are few rows. `keys`: how many numbers they are in a chunk."""
    few = num_rows <= (FEW if num_tokens > num_rows else FEW_SINGLE)
    if few and num_tokens < SHORT * num_rows and decays == 1 and keys <= 2048:
        return few_plan(num_tokens, num_rows, heads, width)
    return in_launches(num_tokens, num_rows, heads, width, decays, keys)


def in_launches(num_tokens: int, num_rows: int, heads: int, width: int, decays: int, keys: int) -> TilePlan:
    """Of `_weigh`, `_step` and `_scan`."""
    many = num_rows * heads >= MANY and decays == 1 and keys <= 2048  # more of either was never timed
    prompts = num_tokens >= SHORT * num_rows
    channels = min(max(pow2(width), 16), 32 if many else 64)
    warps, tiles, together = max(channels // 16, 1) if many else 4, heads * cdiv(width, channels), 1
    while tiles % (together * 2) == 0 and together < 4 and num_rows * tiles // (together * 2) >= MANY:
        together *= 2
    weigh_warps = 2 if (many or prompts) and decays == 1 else 4
    registers = 168 if many and not prompts else 0  # of 168, six programs a multiprocessor
    shares = 264 if many and num_tokens == num_rows else 1056 // weigh_warps  # of one token, few pass an edge
    scan_stages = 3 if keys <= 2048 else 1  # two larger chunks do not fit the 48 KB that TensorRT gives
    return TilePlan(
        channels, together, 3, warps, min(channels, 32), 4, scan_stages, 264, weigh_warps, registers, shares,
        many,
    )  # fmt: skip


def few_plan(num_tokens: int, num_rows: int, heads: int, width: int) -> TilePlan:
    """As many programs as there are places, or fewer; rows that pass an edge pay for each of their tiles."""
    channels = min(max(pow2(width), 16), 32 if num_tokens == 1 else 64)
    blocks, tiles = cdiv(width, channels), 1
    while num_rows * heads * blocks > tiles * PLACES and blocks % (tiles * 2) == 0:
        tiles *= 2
    return FP32._replace(channels=channels, tiles=tiles, warps=4, few=True)


def variants(largest: Size, *arguments: Any) -> Iterator[Variant]:
    """And with one token more than rows, from which on few rows are fewer."""
    yield from every_number_of_rows(largest)
    for rows in range(1, min(largest.rows, FEW_SINGLE, largest.tokens - 1) + 1):
        yield Variant(Size(rows + 1, rows, largest.pages))


def ahead(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, *rest: Any
) -> Iterator[dict[str, TilePlan]]:  # fmt: skip
    """The plan of the largest step; without one launch for few rows, which takes 64 KB where wgmma is not."""
    yield {}
    rows, chunk_len = rest[-2:]
    heads, width = v.shape[1:]
    yield {"plan": in_launches(len(q), len(rows), heads, width, a.shape[2], chunk_len * k.shape[2])}


def delta(
    q: torch.Tensor,  # [T, G, K] bf16 or fp32, normalised and scaled; k, v and their records likewise
    k: torch.Tensor,  # [T, G, K] normalised
    v: torch.Tensor,  # [T, H, V]
    a: torch.Tensor,  # [T, H, J] fp32 or bf16, raw; J = 1 or K
    b: torch.Tensor,  # [T, H] fp32 or bf16, raw
    dt_bias: torch.Tensor,  # [H, J] fp32
    A: torch.Tensor,  # [H] fp32, negative
    state: torch.Tensor,  # [S, H, K, V] fp32
    k_records: torch.Tensor,  # [S, R, G, K]
    v_records: torch.Tensor,  # [S, R, H, V]
    g_records: torch.Tensor,  # [S, R, H, J] fp32
    beta_records: torch.Tensor,  # [S, R, H] fp32
    rows: torch.Tensor,  # [N, 8] int32
    chunk_len: int,
    plan: TilePlan | None = None,  # free: bits do not depend on it
) -> torch.Tensor:
    """o[T, H, V]; see reference.py."""
    (num_tokens, groups, depth), (heads, width), decays = k.shape, v.shape[1:], a.shape[2]
    device, ring_len, num_rows = k.device, k_records.shape[1], rows.shape[0]
    tokens, records = (q, k, v, a, b, dt_bias, A), (k_records, v_records, g_records, beta_records)
    _check(tokens, state, records, rows, chunk_len)
    if plan is None and q.dtype is torch.float32:
        plan = FP32
    plan = plan or choose(num_tokens, num_rows, heads, width, decays, chunk_len * depth)
    tickets = None
    if plan.few or device.type == "cuda":  # in a layer's first call whatever its plan: no graph captures that
        tickets = tickets_of(state, groups)
    o = torch.empty((num_tokens, heads, width), dtype=v.dtype, device=device)
    tiles, clears = heads * cdiv(width, plan.channels), max(cdiv(num_tokens, CLEAR_TOKENS), 1)
    strides = (k.stride(0), v.stride(0), a.stride(0), b.stride(0))
    sizes = dict(H=heads, G=groups, K=depth, V=width, J=decays, CHUNK=chunk_len, enable_fp_fusion=False)
    if tiles % plan.tiles:
        raise ValueError(f"delta: a program of {plan.tiles} tiles, of {tiles} tiles of a row")
    if plan.few:
        if tiles // heads % plan.tiles or q.dtype is torch.float32:
            raise ValueError(f"delta: one launch of {plan.tiles} tiles a program, of {tiles // heads} a head")
        _few[(clears + num_rows * tiles // plan.tiles,)](
            *tokens, state, *records, rows, o, tickets, clears, num_rows, num_tokens, ring_len, q.stride(0),
            *strides, state, **sizes, BV=plan.channels, TILES=plan.tiles, num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
        return o
    sizes["ORDERED"] = plan.ordered
    query = torch.empty((num_tokens, heads, 2, depth), dtype=q.dtype, device=device)  # in two halves
    mixed = torch.empty((num_tokens, heads, width), dtype=torch.float32, device=device)
    lines = num_tokens + num_rows * cdiv(ring_len, chunk_len) * chunk_len  # see line_of
    keys = torch.empty((lines, groups, depth), dtype=k.dtype, device=device)
    solved_keys = torch.empty((lines, heads, 2, depth), dtype=k.dtype, device=device)
    solved_values = torch.empty((lines, heads, width), dtype=torch.float32, device=device)
    totals = torch.empty((lines, heads, decays), dtype=torch.float32, device=device)
    order = rows.new_empty((num_rows, 16)) if plan.ordered else rows  # as `_step` takes them
    gates = (a, b, dt_bias, A)
    weights = (query, mixed, keys, solved_keys, solved_values, totals)
    shares = min(num_tokens * heads, plan.shares)
    _weigh[(clears + shares + num_rows * heads,)](
        q, k, v, *gates, *records, rows, o, *weights, order, clears, shares, num_rows, num_tokens,
        ring_len, q.stride(0), *strides, **sizes, num_warps=plan.weigh_warps, num_stages=1,
        **({"maxnreg": plan.weigh_registers} if plan.weigh_registers else {}),
    )  # fmt: skip
    _step[(num_rows * tiles // plan.tiles,)](
        k, v, *gates, state, *records, order, o, *weights, num_tokens, ring_len, *strides, state, **sizes,
        BV=plan.channels, TILES=plan.tiles, STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    if num_tokens > SHORT or ring_len + num_tokens >= 2 * chunk_len:  # else no row is long
        items = num_rows * heads * cdiv(width, plan.scan_channels)
        _scan[(min(items, plan.programs),)](
            state, rows, o, *weights, order, num_rows, num_tokens, ring_len, **sizes,
            BV=plan.scan_channels, STAGES=plan.scan_stages, num_warps=plan.scan_warps, num_stages=1,
        )  # fmt: skip
    return o


def _check(
    tokens: Sequence[torch.Tensor],
    state: torch.Tensor,
    records: Sequence[torch.Tensor],
    rows: torch.Tensor,
    chunk_len: int,
) -> None:
    """Raises ValueError where sizes contradict, or are none that the kernels take."""
    q, k, v, a, b, dt_bias, A = tokens
    k_records, v_records, g_records, beta_records = records
    (num_tokens, groups, depth), (heads, width), decays = k.shape, v.shape[1:], a.shape[2]
    slots, ring_len = k_records.shape[:2]
    raw = (torch.float32, torch.bfloat16)
    device = k.device
    check("delta", "q", q, (num_tokens, groups, depth), ENGINES, device, apart=1)
    check("delta", "k", k, (num_tokens, groups, depth), q.dtype, device, apart=1)
    check("delta", "v", v, (num_tokens, heads, width), q.dtype, device, apart=1)
    check("delta", "a", a, (num_tokens, heads, decays), raw, device, apart=1)
    check("delta", "b", b, (num_tokens, heads), raw, device, apart=1)
    check("delta", "dt_bias", dt_bias, (heads, decays), torch.float32, device)
    check("delta", "A", A, (heads,), torch.float32, device)
    check("delta", "state", state, (slots, heads, depth, width), torch.float32, device)
    check("delta", "k_records", k_records, (slots, ring_len, groups, depth), q.dtype, device)
    check("delta", "v_records", v_records, (slots, ring_len, heads, width), q.dtype, device)
    check("delta", "g_records", g_records, (slots, ring_len, heads, decays), torch.float32, device)
    check("delta", "beta_records", beta_records, (slots, ring_len, heads), torch.float32, device)
    check("delta", "rows", rows, (rows.shape[0], 8), torch.int32, device)
    if chunk_len not in (16, 32) or depth != pow2(depth) or depth < 16 or heads % groups:
        raise ValueError(f"delta: chunk_len {chunk_len}, depth {depth}, {heads} heads of {groups} groups")
    if decays not in (1, depth):
        raise ValueError(f"delta: {decays} decays per head, expected 1 or {depth}")
