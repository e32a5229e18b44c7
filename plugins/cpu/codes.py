"""Codes of quantised weights as fp32 numbers, 16 at a time: int8, and two of 4 bits in a byte."""

from typing import Any

from llvmlite import ir
from numba.core import types

from hemiola.plugins.cpu.e4m3 import BYTES
from hemiola.plugins.cpu.simd import INTS, LANES, VECTOR, intrinsic, place, vector


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _signed(b: Any, raw: Any) -> Any:
    return b.sitofp(b.sext(raw, INTS), VECTOR)


def _low(b: Any, raw: Any) -> Any:
    return b.and_(b.zext(raw, INTS), _ints(15))


def _high(b: Any, raw: Any) -> Any:
    return b.lshr(b.zext(raw, INTS), _ints(4))


def _counted(b: Any, code: Any) -> Any:
    """0 to 15."""
    return b.sitofp(code, VECTOR)


def _e2m1(b: Any, code: Any) -> Any:
    """A sign, two bits of exponent, one of mantissa; an exponent of 0 is read as 1 more than it is."""
    size, sign = b.and_(code, _ints(7)), b.shl(b.and_(code, _ints(8)), _ints(28))
    small = b.icmp_unsigned("<", size, _ints(2))
    base = b.select(small, _ints(127 << 23), _ints(126 << 23))
    value = b.bitcast(b.add(b.shl(size, _ints(22)), base), VECTOR)
    value = b.fsub(value, b.select(small, _floats(1.0), _floats(0.0)))
    return b.bitcast(b.or_(b.bitcast(value, INTS), sign), VECTOR)


def _loader(name: str, meaning: str, *steps: Any) -> Any:
    """The 16 bytes behind an address and an offset, by these steps."""

    def function(typing: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            value = b.load(place(b, args[0], args[1], BYTES), align=1)
            for step in steps:
                value = step(b, value)
            return value

        return vector(types.int64, types.int64), build

    function.__name__, function.__doc__ = name, meaning
    return intrinsic(function)


load_int8 = _loader("load_int8", "16 signed numbers of 8 bits.", _signed)
load_low_int4 = _loader("load_low_int4", "The low four bits of 16 bytes, 0 to 15.", _low, _counted)
load_high_int4 = _loader("load_high_int4", "The high four bits of 16 bytes, 0 to 15.", _high, _counted)
load_low_e2m1 = _loader("load_low_e2m1", "The e2m1 numbers in the low halves of 16 bytes.", _low, _e2m1)
load_high_e2m1 = _loader("load_high_e2m1", "The e2m1 numbers in the high halves of 16 bytes.", _high, _e2m1)
