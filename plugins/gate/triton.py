"""A gate on every channel, on CUDA."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import sigmoid, silu


@triton.jit
def _gate(x, gate, y, x_len, gate_len, width, BLOCK: tl.constexpr, SINGLE: tl.constexpr, SILU: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of one token.
    # Traffic: x and gate once, y once.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0).to(tl.float32)
    if SINGLE:
        opening = tl.load(gate + token * gate_len).to(tl.float32)
    else:
        opening = tl.load(gate + token * gate_len + at, mask=inside, other=0.0).to(tl.float32)
    factor = silu(opening) if SILU else sigmoid(opening)
    tl.store(y + token * width + at, (value * factor).to(y.dtype.element_ty), mask=inside)
