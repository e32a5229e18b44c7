"""RMS norm over groups of channels, compiled: a token at a time, so its bits depend on nothing else."""

import numpy as np

from hemiola.plugins.cpu.activations import silu
from hemiola.plugins.cpu.code import Operand, code_of, lines, numel
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import LANES, f32, fma, from_bits, load, mul, splat, store, total
from hemiola.plugins.sizes import ceil_div

BLOCK = 16  # tokens of an item of work
UNGATED, GATE_FIRST, GATE_LAST = 0, 1, 2


def norm(
    x: Operand,  # [T, W]
    gate: Operand,  # [T, W], or zero-length: none
    weight: Operand,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> Operand:  # [T, W]
    """See reference.py."""
    code, x, order = code_of(x), lines(x), UNGATED
    y = code.empty(*x.shape)
    if len(gate.shape) > 1:
        gate, order = lines(gate), GATE_FIRST if gate_first else GATE_LAST
    cost = numel(x) * (0.4 if order else 0.25)
    sizes = (*x.shape, group_len, eps, order)
    where = (x, x.stride(0), gate, gate.stride(0), weight, y)
    code.call(_norm, ceil_div(x.shape[0], BLOCK), cost, *sizes, *where)
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
