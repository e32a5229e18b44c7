"""Mamba2's recurrence on CUDA: chunks of the absolute grid, one arithmetic for prompts and decode.

A chunk with edge state S0 and a = cumsum(dt A) (Dao and Gu 2024, arXiv 2405.21060):
    y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
    S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
A token's bits depend on its chunk's places up to it: tiles have fixed shapes, absent tokens are zeros, and
multiply-adds are never contracted (enable_fp_fusion=False). Rows of a few tokens share a
program per some heads, whose states arrive while others are at work (`_step`, for which `_weigh` has summed
up decays); a long row keeps a state in registers (`_scan`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.dtypes import ENGINES
from hemiola.plugins.gpu.launch import CLEAR_TOKENS, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import every_number_of_rows
from hemiola.plugins.gpu.tickets import tickets_of

_weigh = Kernel("mamba2", "_weigh")
_step = Kernel("mamba2", "_step")
_scan = Kernel("mamba2", "_scan")

SHORT = 16  # tokens of a row that is not long
TILE_NUMBERS = 64 * 128  # of a state; three such tiles are on their way in 99 KB

variants = every_number_of_rows


class TilePlan(NamedTuple):
    """How a launch is cut; bits do not depend on it."""

    channels: int  # of a tile
    heads: int  # of a program
    stages: int  # tiles of state on their way
    pass_stages: int  # the same where a row passes an edge
    warps: int
    scan_channels: int
    scan_stages: int
    scan_warps: int
    programs: int  # of `_scan`


def choose(num_rows: int, heads: int, width: int, groups: int, depth: int) -> TilePlan:
    """A warp for 16 channels; many rows: narrower tiles, a few heads a program (gpu_recurrences.md)."""
    widest = next(c for c in (64, 32, 16) if (width % c == 0 and c * depth <= TILE_NUMBERS) or c == 16)
    channels, together = min(widest, 32) if num_rows * heads >= 528 else widest, 1
    while (
        together * 2 * width <= 256
        and heads // groups % (together * 2) == 0
        and num_rows * heads // (together * 2) >= 528
    ):
        together *= 2
    return TilePlan(channels, together, 3, 2, channels // 16, widest, 2, 4, 264)


FP32 = TilePlan(16, 1, 1, 1, 4, 16, 1, 4, 264)  # of engines in fp32, whose products are in registers


def ahead(
    gpu: Gpu, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt: torch.Tensor, dt_bias: torch.Tensor,
    A: torch.Tensor, D: torch.Tensor, state: torch.Tensor, x_records: torch.Tensor, B_records: torch.Tensor,
    dt_records: torch.Tensor, rows: torch.Tensor, *rest: float,
) -> Iterator[dict[str, TilePlan]]:  # fmt: skip
    """The plan of the largest step, then tiles that need less shared memory."""
    (heads, width), (groups, depth) = x.shape[1:], B.shape[1:]
    plan = choose(rows.shape[0], heads, width, groups, depth)
    yield {"plan": plan}
    yield {"plan": plan._replace(channels=16, warps=1)}


def mamba2(
    x: torch.Tensor,  # [T, H, P] bf16 or fp32; B, C and records likewise
    B: torch.Tensor,  # [T, G, D]
    C: torch.Tensor,  # [T, G, D]
    dt: torch.Tensor,  # [T, H] fp32 or bf16, raw
    dt_bias: torch.Tensor,  # [H] fp32
    A: torch.Tensor,  # [H] fp32, negative
    D: torch.Tensor,  # [H] fp32
    state: torch.Tensor,  # [S, H, P, D] fp32
    x_records: torch.Tensor,  # [S, R, H, P]
    B_records: torch.Tensor,  # [S, R, G, D]
    dt_records: torch.Tensor,  # [S, R, H] fp32
    rows: torch.Tensor,  # [N, 8] int32
    chunk_len: int,
    dt_min: float,
    dt_max: float,
    plan: TilePlan | None = None,  # free: bits do not depend on it
) -> torch.Tensor:
    """y[T, H, P], the D * x term included; see reference.py."""
    (num_tokens, heads, width), (groups, depth) = x.shape, B.shape[1:]
    (slots, ring_len), num_rows, device = x_records.shape[:2], rows.shape[0], x.device
    check("mamba2", "x", x, (num_tokens, heads, width), ENGINES, device, apart=1)
    check("mamba2", "B", B, (num_tokens, groups, depth), x.dtype, device, apart=1)
    check("mamba2", "C", C, (num_tokens, groups, depth), x.dtype, device, apart=1)
    check("mamba2", "dt", dt, (num_tokens, heads), (torch.float32, torch.bfloat16), device, apart=1)
    for name, value in (("dt_bias", dt_bias), ("A", A), ("D", D)):
        check("mamba2", name, value, (heads,), torch.float32, device)
    check("mamba2", "state", state, (slots, heads, width, depth), torch.float32, device)
    check("mamba2", "x_records", x_records, (slots, ring_len, heads, width), x.dtype, device)
    check("mamba2", "B_records", B_records, (slots, ring_len, groups, depth), x.dtype, device)
    check("mamba2", "dt_records", dt_records, (slots, ring_len, heads), torch.float32, device)
    check("mamba2", "rows", rows, (num_rows, 8), torch.int32, device)
    if chunk_len not in (16, 32) or depth != pow2(depth) or depth < 16 or heads % groups:
        raise ValueError(f"mamba2: chunk_len {chunk_len}, depth {depth}, {heads} heads of {groups} groups")
    y = torch.empty((num_tokens, heads, width), dtype=x.dtype, device=device)
    plan = plan or (FP32 if x.dtype is torch.float32 else choose(num_rows, heads, width, groups, depth))
    if heads // groups % plan.heads:
        raise ValueError(f"mamba2: a program of {plan.heads} heads, of {heads // groups} heads of a group")
    warps = max(plan.warps, plan.scan_warps)
    if warps > 4:  # two warpgroups on a tile of 64 channels read illegal addresses under Triton 3.6
        raise ValueError(f"mamba2: a plan of {warps} warps, expected at most 4")
    tickets = tickets_of(state)
    sizes = torch.empty((num_rows, heads, 4, chunk_len), dtype=torch.float32, device=device)
    order = torch.empty((num_rows,), dtype=torch.int32, device=device)
    limits = (ring_len, dt.stride(0), dt_min, dt_max)
    strides = (ring_len, x.stride(0), B.stride(0), C.stride(0))
    lens = dict(H=heads, P=width, CHUNK=chunk_len, enable_fp_fusion=False)
    deep = dict(G=groups, N=depth)
    clears = cdiv(num_tokens, CLEAR_TOKENS)
    _weigh[(clears + 1 + num_rows * heads // plan.heads,)](
        dt, dt_bias, A, dt_records, rows, y, sizes, order, clears, num_rows, num_tokens, *limits, **lens,
        HEADS=plan.heads, num_warps=1,
    )  # fmt: skip
    _step[(num_rows * heads // plan.heads,)](
        x, B, C, D, state, x_records, B_records, rows, y, sizes, order, tickets, *strides, state, x_records,
        **lens, **deep, BP=plan.channels, HB=plan.heads, STAGES=plan.stages, PASS_STAGES=plan.pass_stages,
        num_warps=plan.warps,
    )  # fmt: skip
    if num_tokens > SHORT or ring_len + num_tokens >= 2 * chunk_len:  # else no row is long
        _scan[(min(plan.programs, num_rows * heads * cdiv(width, plan.scan_channels)),)](
            x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y, tickets, num_rows,
            *strides, *limits[1:], **lens, **deep, BP=plan.scan_channels, STAGES=plan.scan_stages,
            num_warps=plan.scan_warps,
        )  # fmt: skip
    return y
