"""RMS norm over groups of channels, on CUDA: one fixed tree of sums per group."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.activations import silu


@triton.jit
def _norm(x, gate, weight, y, x_len, gate_len, width, eps, GROUP_LEN: tl.constexpr, LANES: tl.constexpr,
          GROUPS: tl.constexpr, GATED: tl.constexpr, GATE_FIRST: tl.constexpr):  # fmt: skip
    # Grid: tokens x blocks of GROUPS groups.
    # Tile: [GROUPS, LANES], summed along the second axis.
    # Traffic: x, gate and weight once, y once.
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    at = group * GROUP_LEN + lane
    inside = (lane < GROUP_LEN) & (at < width)
    scale = tl.load(weight + at, mask=inside, other=0.0)  # asked for before the sum, which takes as long
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        opening = silu(tl.load(gate + token * gate_len + at, mask=inside, other=0.0).to(tl.float32))
        if GATE_FIRST:
            value = value * opening
    square = tl.sum(value * value, axis=1, keep_dims=True) / GROUP_LEN
    value = value * tl.div_rn(1.0, tl.sqrt_rn(square + eps))
    value = value * scale.to(tl.float32)
    if GATED and not GATE_FIRST:
        value = value * opening
    tl.store(y + token * width + at, value.to(y.dtype.element_ty), mask=inside)
