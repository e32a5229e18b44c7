"""Products of fp32 tiles on bf16 tensor cores: a number as the sum of two bf16 halves, about 17 bits.

Engines in fp32 have no halves: all products are chains of fused multiply-adds, without tensor cores.
"""

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies bf16 bit patterns as integers, so there tiles are widened first.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b):
    """a times b, both bf16 or both fp32, summed in fp32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_dot(sums, a, b):
    """sums + a times b."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    else:
        return tl.dot(a, b, sums, input_precision="ieee")


# Two numbers at a time; from Triton's own conversions the compiler makes a third more instructions.
_HALVES = tl.constexpr(
    "{ .reg .b32 a, b; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 a, $0, 16; and.b32 b, $0, 0xffff0000;"
    " sub.rn.f32 a, $2, a; sub.rn.f32 b, $3, b; cvt.rn.bf16x2.f32 $1, b, a; }"
)


@triton.jit
def halves(a, dtype: tl.constexpr):
    """`a` as high + low, both bf16; in an fp32 engine `a` and zeros."""
    if dtype == tl.float32:
        return a, tl.zeros_like(a)
    elif _INTERPRETED:
        high = a.to(tl.bfloat16)
        return high, (a - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            _HALVES, "=&r,=r,r,r", [a], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def dot_wide_left(a, b):
    """a (fp32) times b (bf16 or fp32)."""
    if b.dtype == tl.float32:
        return dot(a, b)
    else:
        high, low = halves(a, b.dtype)
        return add_dot(dot(low, b), high, b)


@triton.jit
def dot_wide_right(a, b):
    """a (bf16 or fp32) times b (fp32)."""
    if a.dtype == tl.float32:
        return dot(a, b)
    else:
        high, low = halves(b, a.dtype)
        return add_dot(dot(a, low), a, high)


@triton.jit
def dot_wide(a, b, dtype: tl.constexpr):
    """a times b, both fp32, in an engine of this dtype; the product of the low halves is left out."""
    if dtype == tl.float32:
        return dot(a, b)
    else:
        a_high, a_low = halves(a, dtype)
        b_high, b_low = halves(b, dtype)
        return add_dot(add_dot(dot(a_low, b_high), a_high, b_low), a_high, b_high)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with log's error in 1 + exp(x) divided out again (Kahan)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def _last(a, b):
    return b


@triton.jit
def once(a):
    """`a`, made once: what is small, and no scan, is loaded and computed again for each layout."""
    return tl.associative_scan(a, 0, _last)
