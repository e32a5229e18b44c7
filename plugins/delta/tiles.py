"""What a tile of a head's state is asked, and what a chunk does to it; see cuda.py."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.precise import add_dot, dot, dot_wide, dot_wide_left, halves


@triton.jit
def ask(s, high, low):
    """The state [BV, K], fp32, times queries [K, t] in two halves."""
    if high.dtype == tl.float32:
        # not just the product: where something is added to one, Triton begins the product's sums with it
        return tl.fma(dot(s, high), 1.0, 0.0)
    else:
        s_high, s_low = halves(s, high.dtype)
        return add_dot(add_dot(dot(s_low, high), s_high, low), s_high, high)


@triton.jit
def fold(s, update, k_c, gain, decay, J: tl.constexpr):
    """The state [BV, K] at the chunk's end; `update` is U before it fades."""
    if J == 1:
        gained = dot_wide_left(update * gain[None, :], k_c)
    else:
        gained = dot_wide(update, k_c.to(tl.float32) * gain, k_c.dtype)
    return s * decay + gained
