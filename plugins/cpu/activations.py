"""Exponentials and what is made of them, 16 numbers at a time."""

from hemiola.plugins.cpu.simd import (
    add,
    constant,
    div,
    f32,
    floor,
    fma,
    inlined,
    largest,
    mul,
    power_of_two,
    smallest,
    splat,
    sub,
)  # fmt: skip


@inlined
def exp(x):
    """e^x within two units in the last place from -87 to 88, below and above soon 0 and inf; Cephes' expf."""
    x = smallest(largest(x, constant(-88.0)), constant(89.0))  # where 2^-127 is 0 and 2^128 inf
    power = floor(fma(x, constant(1.44269504088896341), constant(0.5)))
    rest = fma(power, constant(-0.693359375), x)
    rest = fma(power, constant(2.12194440e-4), rest)
    y = fma(constant(1.9875691500e-4), rest, constant(1.3981999507e-3))
    y = fma(y, rest, constant(8.3334519073e-3))
    y = fma(y, rest, constant(4.1665795894e-2))
    y = fma(y, rest, constant(1.6666665459e-1))
    y = fma(y, rest, constant(5.0000001201e-1))
    y = fma(y, mul(rest, rest), add(rest, constant(1.0)))
    return mul(y, power_of_two(power))


@inlined
def sigmoid(x):
    """1 / (1 + e^-x)"""
    return div(constant(1.0), add(constant(1.0), exp(sub(splat(f32(0.0)), x))))


@inlined
def silu(x):
    """x * sigmoid(x)"""
    return div(x, add(constant(1.0), exp(sub(splat(f32(0.0)), x))))


@inlined
def softplus(x):
    """log(1 + e^x) within three units in the last place: max(x, 0) + 2 atanh(y / (2 + y)), y = e^-|x|"""
    zero = splat(f32(0.0))
    y = exp(smallest(x, sub(zero, x)))
    s = div(y, add(constant(2.0), y))
    square = mul(s, s)  # at most 1 / 9
    sums = fma(constant(1 / 15), square, constant(1 / 13))
    sums = fma(sums, square, constant(1 / 11))
    sums = fma(sums, square, constant(1 / 9))
    sums = fma(sums, square, constant(1 / 7))
    sums = fma(sums, square, constant(1 / 5))
    sums = fma(sums, square, constant(1 / 3))
    atanh = fma(mul(sums, square), s, s)
    return add(largest(x, zero), add(atanh, atanh))
