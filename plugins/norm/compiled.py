"""RMS norm over groups of channels, compiled: a token at a time, so its bits depend on nothing else."""

import numpy as np
import torch

from hemiola.plugins.cpu.jit import Kernel, lines
from hemiola.plugins.cpu.simd import LANES, f32, fma, from_bits, load, mul, silu, splat, store, total

BLOCK = 16  # tokens of an item of work
UNGATED, GATE_FIRST, GATE_LAST = 0, 1, 2


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """See reference.py."""
    y = torch.empty(*x.shape)
    if not x.numel():
        return y
    x, order = lines(x), UNGATED
    if gate.numel():
        gate, order = lines(gate), GATE_FIRST if gate_first else GATE_LAST
    cost = x.numel() * (0.4 if order else 0.25)
    sizes = (*x.shape, group_len, eps, order)
    _norm(-(-x.shape[0] // BLOCK), cost, *sizes, x, x.stride(0), gate, gate.stride(0), weight, y)
    return y


@Kernel
def _norm(item, scratch, num_tokens, width, group_len, eps, order, x, x_len, gate, gate_len, weight, y):
    """An item is BLOCK tokens. x_len is from token to token of x."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for group in range(0, width, group_len):
            squares = splat(f32(0.0))
            for i in range(group, group + group_len, LANES):
                value = load(x, t * x_len + i)
                if order == GATE_FIRST:
                    value = mul(value, silu(load(gate, t * gate_len + i)))
                    store(y, t * width + i, value)
                squares = fma(value, value, squares)
            scale = splat(f32(1.0) / np.sqrt(total(squares) / f32(group_len) + from_bits(eps)))
            for i in range(group, group + group_len, LANES):
                value = load(y, t * width + i) if order == GATE_FIRST else load(x, t * x_len + i)
                value = mul(mul(value, scale), load(weight, i))
                if order == GATE_LAST:
                    value = mul(value, silu(load(gate, t * gate_len + i)))
                store(y, t * width + i, value)
