"""RMS norm over groups of channels, compiled: a token at a time, so its bits depend on nothing else."""

import numpy as np
import torch

from hemiola.plugins.jit import Kernel, bits, lines
from hemiola.plugins.norm.cpu import norm as in_torch
from hemiola.plugins.simd import (
    LANES,
    f32,
    fma,
    from_bits,
    load,
    mul,
    silu,
    splat,
    store,
    take,
    total,
    unpack,
)

BLOCK = 16  # tokens that a thread takes at a time


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """See reference.py."""
    if group_len % LANES or x.shape[1] % group_len or x.shape[1] != weight.shape[0]:
        return in_torch(x, gate, weight, eps, group_len, gate_first)
    y = torch.empty(x.shape)
    x, gated = lines(x), gate.numel() > 0
    gate = lines(gate) if gated else gate
    order = 0 if not gated else 1 if gate_first else 2
    sizes = (*x.shape, group_len, bits(eps), x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0))
    cost = x.numel() * (0.4 if gated else 0.25)
    _norm(-(-x.shape[0] // BLOCK), cost, *sizes, order, weight.data_ptr(), y.data_ptr())
    return y


@Kernel
def _norm(call):
    """An item is BLOCK tokens. x_len is from token to token of x; order: no gate, gate first, gate after."""
    (
        num_items, num_tokens, width, group_len, eps, x, x_len, gate, gate_len, order, weight, y,
    ) = unpack(call, 11)  # fmt: skip
    while True:
        item = take(call)
        if item >= num_items:
            break
        for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
            for group in range(0, width, group_len):
                squares = splat(f32(0.0))
                for i in range(group, group + group_len, LANES):
                    value = load(x, t * x_len + i)
                    if order == 1:
                        value = mul(value, silu(load(gate, t * gate_len + i)))
                        store(y, t * width + i, value)
                    squares = fma(value, value, squares)
                scale = splat(f32(1.0) / np.sqrt(total(squares) / f32(group_len) + from_bits(eps)))
                for i in range(group, group + group_len, LANES):
                    value = load(y, t * width + i) if order == 1 else load(x, t * x_len + i)
                    value = mul(mul(value, scale), load(weight, i))
                    if order == 2:
                        value = mul(value, silu(load(gate, t * gate_len + i)))
                    store(y, t * width + i, value)
