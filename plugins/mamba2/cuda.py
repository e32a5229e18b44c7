"""Mamba2's recurrence on CUDA: chunks of the absolute grid, one arithmetic for prompts and decode.

A chunk with edge state S0 and a = cumsum(dt A) (Dao and Gu 2024, arXiv 2405.21060):
    y_t = exp(a_t) C_t.S0 + sum_{s <= t} (C_t.B_s) exp(a_t - a_s) dt_s x_s + D x_t
    S1  = exp(a_C) S0 + sum_s exp(a_C - a_s) dt_s x_s (x) B_s
A token's bits depend on its chunk's places up to it: tiles have fixed shapes, absent tokens are zeros, and
multiply-adds are never contracted (enable_fp_fusion=False). Rows of a few tokens share a
program per some heads, whose states arrive while others are at work (`_step`, and `_pass` where they pass an
edge); a long row keeps a state in registers (`_scan`).
"""

from typing import NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.launch import CLEAR_TOKENS, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import every_number_of_rows

_step = Kernel("mamba2", "_step")
_pass = Kernel("mamba2", "_pass")
_scan = Kernel("mamba2", "_scan")
variants = every_number_of_rows

SHORT = 16  # tokens of a row that is not long


class TilePlan(NamedTuple):
    """How a launch is cut; bits do not depend on it."""

    channels: int  # of a tile
    heads: int  # of a program
    stages: int  # tiles of state on their way
    pass_heads: int  # the same where a row passes an edge
    pass_stages: int
    warps: int
    scan_channels: int
    scan_stages: int
    programs: int  # of `_pass` and `_scan`


def choose(num_rows: int, heads: int, width: int, groups: int) -> TilePlan:
    """Few heads a program while there are few rows."""
    channels = next(c for c in (64, 32, 16) if width % c == 0 or c == 16)
    together = 1
    while heads // groups % (together * 2) == 0 and num_rows * heads // (together * 2) >= 528:
        together *= 2
    return TilePlan(channels, together, 3, min(together, 8), 2, 4, channels, 2, 264)


def mamba2(
    x: torch.Tensor,  # [T, H, P] bf16
    B: torch.Tensor,  # [T, G, D] bf16
    C: torch.Tensor,  # [T, G, D] bf16
    dt: torch.Tensor,  # [T, H] fp32 or bf16, raw
    dt_bias: torch.Tensor,  # [H] fp32
    A: torch.Tensor,  # [H] fp32, negative
    D: torch.Tensor,  # [H] fp32
    state: torch.Tensor,  # [S, H, P, D] fp32
    x_records: torch.Tensor,  # [S, R, H, P] bf16
    B_records: torch.Tensor,  # [S, R, G, D] bf16
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
    check("mamba2", "x", x, (num_tokens, heads, width), torch.bfloat16, device, apart=1)
    check("mamba2", "B", B, (num_tokens, groups, depth), torch.bfloat16, device, apart=1)
    check("mamba2", "C", C, (num_tokens, groups, depth), torch.bfloat16, device, apart=1)
    check("mamba2", "dt", dt, (num_tokens, heads), (torch.float32, torch.bfloat16), device, apart=1)
    for name, value in (("dt_bias", dt_bias), ("A", A), ("D", D)):
        check("mamba2", name, value, (heads,), torch.float32, device)
    check("mamba2", "state", state, (slots, heads, width, depth), torch.float32, device)
    check("mamba2", "x_records", x_records, (slots, ring_len, heads, width), torch.bfloat16, device)
    check("mamba2", "B_records", B_records, (slots, ring_len, groups, depth), torch.bfloat16, device)
    check("mamba2", "dt_records", dt_records, (slots, ring_len, heads), torch.float32, device)
    check("mamba2", "rows", rows, (num_rows, 8), torch.int32, device)
    if chunk_len not in (16, 32) or depth != pow2(depth) or depth < 16 or heads % groups:
        raise ValueError(f"mamba2: chunk_len {chunk_len}, depth {depth}, {heads} heads of {groups} groups")
    y = torch.empty((num_tokens, heads, width), dtype=x.dtype, device=device)
    plan = plan or choose(num_rows, heads, width, groups)
    if plan.warps > 4:  # two warpgroups on a tile of 64 channels read illegal addresses under Triton 3.6
        raise ValueError(f"mamba2: a plan of {plan.warps} warps, expected at most 4")
    for together in (plan.heads, plan.pass_heads):
        if heads // groups % together:
            raise ValueError(f"mamba2: {together} heads a program, groups of {heads // groups} heads")
    tensors = (x, B, C, dt, dt_bias, A, D, state, x_records, B_records, dt_records, rows, y)
    tickets = _tickets(state)
    strides = (ring_len, x.stride(0), B.stride(0), C.stride(0), dt.stride(0), dt_min, dt_max)
    sizes = dict(
        H=heads, P=width, G=groups, N=depth, CHUNK=chunk_len, num_warps=plan.warps, enable_fp_fusion=False
    )
    clears = cdiv(num_tokens, CLEAR_TOKENS)
    _step[(clears + num_rows * heads // plan.heads,)](
        *tensors, tickets, clears, num_rows, num_tokens, *strides, state, x_records, dt_records, **sizes,
        BP=plan.channels, HB=plan.heads, STAGES=plan.stages,
    )  # fmt: skip
    _pass[(min(plan.programs, num_rows * heads // plan.pass_heads),)](
        *tensors, tickets, num_rows, *strides, state, x_records, dt_records, **sizes,
        BP=plan.channels, HB=plan.pass_heads, STAGES=plan.pass_stages,
    )  # fmt: skip
    if num_tokens > SHORT or ring_len + num_tokens >= 2 * chunk_len:  # else no row is long
        _scan[(min(plan.programs, num_rows * heads * cdiv(width, plan.scan_channels)),)](
            *tensors, tickets, num_rows, *strides, **sizes, BP=plan.scan_channels, STAGES=plan.scan_stages
        )
    return y


def _tickets(state: torch.Tensor) -> torch.Tensor:
    """Counters by slot, zero between launches, that live as long as the layer's state: its first call must
    come before a graph's capture."""
    if "tickets" not in vars(state):
        vars(state)["tickets"] = torch.zeros(state.shape[0], dtype=torch.int32, device=state.device)
    return vars(state)["tickets"]
