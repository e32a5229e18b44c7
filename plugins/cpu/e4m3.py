"""Numbers of 8 bits (e4m3: sign, 4 bits of exponent, 3 of mantissa, no infinity), 16 at a time.

Every one of them is an fp32 number. Both ways are a dozen integer operations on registers: a table of 256
numbers is read three times as slowly (benchmarks/attention_cpu.md), and subnormal fp32 numbers, slow on some
CPUs, do not occur.
"""

from typing import Any

from llvmlite import ir
from numba.core import types

from hemiola.plugins.cpu.simd import INTS, LANES, VECTOR, intrinsic, loaded, place, vector

BYTES = ir.VectorType(ir.IntType(8), LANES)
LEAST = 2.0**-6  # the least normal number; an exponent of 0 stands for multiples of 2^-9
UNIT_STEP = 141 << 23  # 2^14, next to which fp32 numbers lie 2^-9 apart
LARGEST = 0x43E00000  # 448
INFINITY = 0x7F800000


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def widened(b: Any, raw: Any) -> Any:
    """Code that makes 16 numbers of 8 bits fp32."""
    wide = b.zext(raw, INTS)
    size, sign = b.and_(wide, _ints(0x7F)), b.shl(b.and_(wide, _ints(0x80)), _ints(24))
    small = b.icmp_unsigned("<", size, _ints(8))
    # exponents are counted from 7, and from 127; a small one is read as LEAST more than it is
    base = b.select(small, _ints(121 << 23), _ints(120 << 23))
    excess = b.select(small, ir.Constant(VECTOR, [LEAST] * LANES), ir.Constant(VECTOR, [0.0] * LANES))
    value = b.fsub(b.bitcast(b.add(b.shl(size, _ints(20)), base), VECTOR), excess)
    bits = b.or_(b.bitcast(value, INTS), sign)
    nan = b.icmp_unsigned("==", size, _ints(0x7F))
    return b.bitcast(b.select(nan, b.or_(_ints(0x7FF00000), sign), bits), VECTOR)


@intrinsic
def load_e4m3(typing: Any, address: Any, offset: Any) -> Any:
    """The 16 numbers behind an address and an offset, as fp32."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return widened(b, b.load(place(b, args[0], args[1], BYTES), align=1))

    return vector(types.int64, types.int64), build


def _codes(b: Any, value: Any) -> Any:
    """Code that makes 16 fp32 numbers the nearest ones of 8 bits, in the low bits of integers."""
    bits = b.bitcast(value, INTS)
    sign = b.and_(bits, loaded(b, -(1 << 31)))
    size = b.xor(bits, sign)
    nan = b.icmp_unsigned(">", size, loaded(b, INFINITY))
    largest, step = loaded(b, LARGEST), loaded(b, UNIT_STEP)
    size = b.select(b.icmp_unsigned("<", size, largest), size, largest)
    multiple = b.sub(b.bitcast(b.fadd(b.bitcast(size, VECTOR), b.bitcast(step, VECTOR)), INTS), step)
    odd = b.and_(b.lshr(size, _ints(20)), loaded(b, 1))
    near = b.add(b.sub(size, loaded(b, (120 << 23) - 0x7FFFF)), odd)
    small = b.icmp_unsigned("<", size, loaded(b, 121 << 23))
    found = b.select(small, multiple, b.lshr(near, _ints(20)))
    return b.or_(b.select(nan, loaded(b, 0x7F), found), b.lshr(sign, _ints(24)))


@intrinsic
def store_e4m3(typing: Any, address: Any, offset: Any, value: Any) -> Any:
    """Put a vector there: the nearest numbers, even ones of two; 448 for what is more; NaN stays NaN."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes = b.trunc(_codes(b, args[2]), BYTES)
        b.store(codes, place(b, args[0], args[1], BYTES), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vector), build


@intrinsic
def nearest_e4m3(typing: Any, value: Any) -> Any:
    """The numbers that `store_e4m3` would store, as fp32."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return widened(b, b.trunc(_codes(b, args[0]), BYTES))

    return vector(vector), build


@intrinsic
def larger_size(typing: Any, a: Any, b: Any) -> Any:
    """The larger of |a| and |b|; NaN where one is."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        one, other = (b.and_(b.bitcast(value, INTS), loaded(b, 0x7FFFFFFF)) for value in args)
        return b.bitcast(b.select(b.icmp_unsigned(">", one, other), one, other), VECTOR)

    return vector(vector, vector), build
