"""The gated delta rule on CUDA, with a decay per head or per channel (KDA): chunks of the absolute grid.

A chunk with edge state S0 and G = cumsum(g) (arXiv 2412.06464, 2510.26692), absent tokens zeros:
    A_ts = beta_t sum_c k_tc k_sc exp(G_tc - G_sc), s < t;   T = (I + A)^-1 diag(beta)
    P_ts = sum_c q_tc k_sc exp(G_tc - G_sc), s <= t;         M = P T
    o    = (q exp(G) - M (k exp(G))) S0 + M v
    S1   = exp(G_C) S0 + (k exp(G_C - G))' U,   U = T v - T (k exp(G)) S0
An output reads the state once, through one vector per token: decode needs neither U nor a product with all
keys. (I + A)^-1 grows from blocks of 1 to C, [[X, 0], [E, Y]]^-1 = [[X^-1, 0], [-Y^-1 E X^-1, Y^-1]], so a
row depends on earlier rows only, and bits depend on no layout. Multiply-adds are never contracted.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.launch import CLEAR_TOKENS, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import every_number_of_rows

_step = Kernel("delta", "_step")
_scan = Kernel("delta", "_scan")
variants = every_number_of_rows


class TilePlan(NamedTuple):
    """How a launch is cut; bits do not depend on it."""

    channels: int  # of V, in a tile
    tiles: int  # of a program of `_step`
    stages: int  # tiles of state on their way
    warps: int
    scan_channels: int
    programs: int  # of `_scan`


def choose(num_rows: int, heads: int, groups: int, width: int) -> TilePlan:
    """Few tiles a program while there are few rows."""
    channels = min(pow2(width), 64)
    tiles = heads // groups * cdiv(width, channels)
    together = 1
    while tiles % (together * 2) == 0 and num_rows * groups * tiles // (together * 2) >= 528:
        together *= 2
    return TilePlan(channels, together, 3, 4, min(channels, 32), 528)


def delta(
    q: torch.Tensor,  # [T, G, K] bf16, normalised and scaled
    k: torch.Tensor,  # [T, G, K] bf16, normalised
    v: torch.Tensor,  # [T, H, V] bf16
    a: torch.Tensor,  # [T, H, J] fp32 or bf16, raw; J = 1 or K
    b: torch.Tensor,  # [T, H] fp32 or bf16, raw
    dt_bias: torch.Tensor,  # [H, J] fp32
    A: torch.Tensor,  # [H] fp32, negative
    state: torch.Tensor,  # [S, H, K, V] fp32
    k_records: torch.Tensor,  # [S, R, G, K] bf16
    v_records: torch.Tensor,  # [S, R, H, V] bf16
    g_records: torch.Tensor,  # [S, R, H, J] fp32
    beta_records: torch.Tensor,  # [S, R, H] fp32
    rows: torch.Tensor,  # [N, 8] int32
    chunk_len: int,
    plan: TilePlan | None = None,  # free: bits do not depend on it
) -> torch.Tensor:
    """o[T, H, V]; see reference.py."""
    (num_tokens, groups, depth), (heads, width), decays = k.shape, v.shape[1:], a.shape[2]
    slots, ring_len = k_records.shape[:2]
    raw = (torch.float32, torch.bfloat16)
    device = k.device
    check("delta", "q", q, (num_tokens, groups, depth), torch.bfloat16, device, apart=1)
    check("delta", "k", k, (num_tokens, groups, depth), torch.bfloat16, device, apart=1)
    check("delta", "v", v, (num_tokens, heads, width), torch.bfloat16, device, apart=1)
    check("delta", "a", a, (num_tokens, heads, decays), raw, device, apart=1)
    check("delta", "b", b, (num_tokens, heads), raw, device, apart=1)
    check("delta", "dt_bias", dt_bias, (heads, decays), torch.float32, device)
    check("delta", "A", A, (heads,), torch.float32, device)
    check("delta", "state", state, (slots, heads, depth, width), torch.float32, device)
    check("delta", "k_records", k_records, (slots, ring_len, groups, depth), torch.bfloat16, device)
    check("delta", "v_records", v_records, (slots, ring_len, heads, width), torch.bfloat16, device)
    check("delta", "g_records", g_records, (slots, ring_len, heads, decays), torch.float32, device)
    check("delta", "beta_records", beta_records, (slots, ring_len, heads), torch.float32, device)
    check("delta", "rows", rows, (rows.shape[0], 8), torch.int32, device)
    if chunk_len not in (16, 32) or depth != pow2(depth) or depth < 16 or heads % groups:
        raise ValueError(f"delta: chunk_len {chunk_len}, depth {depth}, {heads} heads of {groups} groups")
    if decays not in (1, depth):
        raise ValueError(f"delta: {decays} decays per head, expected 1 or {depth}")
    o = torch.empty((num_tokens, heads, width), dtype=v.dtype, device=v.device)
    num_rows = rows.shape[0]
    plan = plan or choose(num_rows, heads, groups, width)
    tensors = (q, k, v, a, b, dt_bias, A, state, k_records, v_records, g_records, beta_records, rows, o)
    strides = (ring_len, q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0))
    sizes = dict(H=heads, G=groups, K=depth, V=width, J=decays, CHUNK=chunk_len, enable_fp_fusion=False)
    clears = cdiv(num_tokens, CLEAR_TOKENS)
    tiles = heads * cdiv(width, plan.channels)
    _step[(clears + num_rows * tiles // plan.tiles,)](
        *tensors, clears, num_rows, num_tokens, *strides, state, **sizes,
        BV=plan.channels, TILES=plan.tiles, STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    items = num_rows * heads * cdiv(width, plan.scan_channels)
    _scan[(min(items, plan.programs),)](
        *tensors, _tickets(state.device, state.data_ptr(), slots), num_rows, *strides, **sizes,
        BV=plan.scan_channels, num_warps=4, num_stages=1,
    )  # fmt: skip
    return o


@lru_cache(maxsize=4096)
def _tickets(device: torch.device, state: int, slots: int) -> torch.Tensor:
    """Counters by slot, zero between launches; a layer's first call must come before a graph's capture."""
    return torch.zeros(slots, dtype=torch.int32, device=device)
