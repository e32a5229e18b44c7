"""The causal depthwise convolution with silu on CUDA, over the ring of raw columns and new tokens alike."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import ENGINES
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import Size, Variant, around

_conv = Kernel("conv", "_conv")


class TilePlan(NamedTuple):
    """What a warp has; no bit depends on it."""

    tokens: int
    channels: int
    registers: int = 255  # of a thread, at most


PLANS = {16: TilePlan(1, 128), 64: TilePlan(1, 256), 1024: TilePlan(4, 256)}  # up to so many tokens
WIDEST = TilePlan(8, 128, 64)


def plan_of(num_tokens: int) -> TilePlan:
    """As measured on an H200, benchmarks/gpu_dense.md."""
    return next((plan for limit, plan in PLANS.items() if num_tokens <= limit), WIDEST)


def variants(largest: Size, *arguments: torch.Tensor) -> Iterator[Variant]:
    """A step of every plan."""
    for tokens in around(PLANS, largest.tokens):
        yield Variant(Size(tokens, 1, 1))


def conv(
    x: torch.Tensor,  # [T, E] bf16 or fp32
    weight: torch.Tensor,  # [E, W] bf16 or fp32
    bias: torch.Tensor,  # [E] bf16 or fp32
    columns: torch.Tensor,  # [S, R, E] like x, updated
    rows: torch.Tensor,  # [N, 8] int32
    chunk_len: int,
    plan: TilePlan | None = None,
) -> torch.Tensor:
    """y[T, E], silu applied: a token reads its column and the W - 1 before; before position 0 are zeros."""
    (num_tokens, width), taps = x.shape, weight.shape[1]
    slots, ring_len = columns.shape[:2]
    device = x.device
    check("conv", "x", x, (num_tokens, width), ENGINES, device, apart=1)
    check("conv", "weight", weight, (width, taps), ENGINES, device)
    check("conv", "bias", bias, (width,), ENGINES, device)
    check("conv", "columns", columns, (slots, ring_len, width), x.dtype, device)
    check("conv", "rows", rows, (rows.shape[0], 8), torch.int32, device)
    if ring_len < chunk_len + taps - 1:
        raise ValueError(
            f"conv: a ring of {ring_len} columns cannot hold a chunk of {chunk_len} and {taps - 1} more"
        )
    y = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    tokens, channels, registers = TilePlan(*plan) if plan else plan_of(num_tokens)
    channels = min(channels, pow2(width))
    _conv[(cdiv(width, channels), cdiv(num_tokens, tokens))](
        x, weight, bias, columns, rows, y, rows.shape[0], num_tokens, x.stride(0),
        E=width, W=taps, RING=ring_len, CHUNK=chunk_len, BE=channels, BT=tokens,
        num_warps=1, enable_fp_fusion=False, maxnreg=registers,
    )  # fmt: skip
    return y
