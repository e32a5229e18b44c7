"""What a tile of a head's state is asked, what a chunk does to it, what it keeps of tokens; see cuda.py."""

import triton
import triton.language as tl

from hemiola.plugins.delta.weights import gates, keep_gates
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


@triton.jit
def keep_values(
    v, v_records, h, p0, start, end, token, base, ring_len, v_len,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """v of 16 new tokens from `start` on to the ring, BV channels."""
    c, p = tl.arange(0, 16), tl.arange(0, BV)
    new, place = start + c < end, (start + c) % ring_len
    mask = new[:, None] & (p < V - p0)[None, :]
    v_c = tl.load(v + (token * v_len + h * V + p0) + (c[:, None] * v_len + p[None, :]), mask=mask)
    kept = v_records + (base * H + h) * V + p0 + (place[:, None] * (H * V) + p[None, :])
    tl.store(kept, v_c, mask=mask)


@triton.jit
def keep_head(
    k, a, b, dt_bias, A, k_records, g_records, beta_records, h, start, end, token, base, ring_len,
    k_len, a_len, b_len, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """A head's gates of 16 new tokens from `start` on to the ring, and its group's k, if it is the first."""
    c, n, g = tl.arange(0, 16), tl.arange(0, K), h // (H // G)
    new, place = start + c < end, (start + c) % ring_len
    g_c, beta_c = gates(a + token * a_len + h * J, b + token * b_len + h, dt_bias + h * J,
                        tl.load(A + h), g_records, beta_records, place, new & False, new,
                        a_len, b_len, H, K, J)  # fmt: skip
    keep_gates(g_records + (base * H + h) * J, beta_records + base * H + h, g_c, beta_c, place,
               new, H, K, J)  # fmt: skip
    if h % (H // G) == 0:
        k_c = tl.load(k + (token * k_len + g * K) + (c[:, None] * k_len + n[None, :]), mask=new[:, None])
        kept_k = k_records + (base * G + g) * K + (place[:, None] * (G * K) + n[None, :])
        tl.store(kept_k, k_c, mask=new[:, None])
