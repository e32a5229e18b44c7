"""A gate on every channel, compiled."""

import torch

from hemiola.plugins.cpu.jit import Kernel, lines
from hemiola.plugins.cpu.simd import LANES, get, load, mul, sigmoid, silu, splat, store

BLOCK = 16  # tokens of an item of work


def gate(
    x: torch.Tensor,  # [T, E]
    gate: torch.Tensor,  # [T, J], J = E or 1
    kind: str,
) -> torch.Tensor:  # [T, E]
    """See reference.py."""
    y = torch.empty(*x.shape)
    if not x.numel():
        return y
    x, gate = lines(x), lines(gate)
    sizes = (*x.shape, gate.shape[1], int(kind == "silu"))
    _gate(-(-x.shape[0] // BLOCK), 0.3 * x.numel(), *sizes, x, x.stride(0), gate, gate.stride(0), y)
    return y


@Kernel
def _gate(item, scratch, num_tokens, width, num_gates, is_silu, x, x_len, gate, gate_len, y):
    """An item is BLOCK tokens. x_len is from token to token of x."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for i in range(0, width, LANES):
            opening = splat(get(gate, t * gate_len)) if num_gates == 1 else load(gate, t * gate_len + i)
            factor = silu(opening) if is_silu == 1 else sigmoid(opening)
            store(y, t * width + i, mul(load(x, t * x_len + i), factor))
