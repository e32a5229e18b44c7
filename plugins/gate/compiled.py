"""A gate on every channel, compiled."""

from hemiola.plugins.cpu.activations import sigmoid, silu
from hemiola.plugins.cpu.code import Operand, code_of, lines, numel
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import LANES, get, load, mul, splat, store
from hemiola.plugins.sizes import ceil_div

BLOCK = 16  # tokens of an item of work


def gate(
    x: Operand,  # [T, E]
    gate: Operand,  # [T, J], J = E or 1
    kind: str,
) -> Operand:  # [T, E]
    """See reference.py."""
    code, x, gate = code_of(x), lines(x), lines(gate)
    y = code.empty(*x.shape)
    sizes = (*x.shape, gate.shape[1], int(kind == "silu"))
    where = (x, x.stride(0), gate, gate.stride(0), y)
    code.call(_gate, ceil_div(x.shape[0], BLOCK), numel(x) * 0.3, *sizes, *where)
    return y


@Kernel
def _gate(item, scratch, num_tokens, width, num_gates, is_silu, x, x_len, gate, gate_len, y):
    """An item is BLOCK tokens. x_len is from token to token of x."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        for i in range(0, width, LANES):
            opening = splat(get(gate, t * gate_len)) if num_gates == 1 else load(gate, t * gate_len + i)
            factor = silu(opening) if is_silu == 1 else sigmoid(opening)
            store(y, t * width + i, mul(load(x, t * x_len + i), factor))
