"""Tiles of a matrix product whose weights are codes: for few rows, widened in registers on their way into the
sums; for more, strips are widened in memory first.

A number is (code - zero point) * scale, rounded, as in groups.py, and sums are the chains of tiles.py, so
bits are those of the widened weight. What a product takes bounds one row of a matrix in a cache
(docs/notes/cpu.md): where no zero points are, none are subtracted, and 16 lanes look numbers up.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from llvmlite import ir
from numba.core import cgutils, types

from hemiola.plugins.cpu.e4m3 import widened
from hemiola.plugins.cpu.registers import CPU, REGISTERS
from hemiola.plugins.cpu.simd import F32, INTS, LANES, LONG, VECTOR, intrinsic, place
from hemiola.plugins.cpu.tiles import ABREAST, AHEAD, DEPTH, FEW, LINE, NEAREST, READ, STRIP
from hemiola.plugins.groups import E2M1

BYTE, SHORTS = ir.IntType(8), ir.VectorType(ir.IntType(16), LANES)
BYTES, HALVES = ir.VectorType(BYTE, LANES), ir.VectorType(ir.HalfType(), LANES)
CONVERTS = CPU[0].startswith(("aarch64", "arm64")) or "+f16c" in CPU[2]  # numbers of 16 bits, by itself
LOOKS_UP = REGISTERS.lanes == LANES  # a register holds the numbers of all codes of 4 bits
# Rows and strips.
SHAPES = [(rows, n) for rows, most in enumerate(ABREAST, 1) for n in sorted({1, most})]
SHAPES += [(rows, 1) for rows in range(len(ABREAST) + 1, FEW + 1)]


Kind = TypeVar("Kind")


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _shorts(value: int) -> Any:
    return ir.Constant(SHORTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


class Codes(NamedTuple):
    """How codes of a kind become numbers."""

    bytes_of_input: int  # of a strip
    unit: float  # numbers are in units of it: what a scale is multiplied with
    has_zeros: bool
    load: Any  # builder, address -> two vectors, in units


def _raw(b: Any, address: Any, index: int) -> Any:
    return b.load(place(b, address, LONG(LANES * index), BYTES), align=1)


def _load_e4m3(b: Any, address: Any) -> list[Any]:
    if not CONVERTS:
        return [widened(b, _raw(b, address, n)) for n in (0, 1)]
    found = []
    for n in (0, 1):  # the bits of a number of 16 bits that is smaller by 2^8
        bits = b.and_(b.shl(b.sext(_raw(b, address, n), SHORTS), _shorts(7)), _shorts(0xBFFF))
        found.append(b.fpext(b.bitcast(bits, HALVES), VECTOR))
    return found


def _half(b: Any, codes: Any) -> Any:
    """Of codes of 4 bits, and more above: the lower three and a sign as numbers of 16 bits, widened."""
    size = b.shl(b.and_(codes, _shorts(7)), _shorts(9))
    sign = b.shl(b.and_(codes, _shorts(8)), _shorts(12))
    return b.fpext(b.bitcast(b.or_(size, sign), HALVES), VECTOR)


def _load_int8(b: Any, address: Any) -> list[Any]:
    return [b.sitofp(b.sext(_raw(b, address, n), INTS), VECTOR) for n in (0, 1)]


def _looked_up(b: Any, codes: Any, numbers: list[float]) -> Any:
    """The number of the lower four bits of each."""
    kind = ir.FunctionType(VECTOR, [VECTOR, INTS])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return b.call(function, [ir.Constant(VECTOR, numbers), codes])


def _load_int4(b: Any, address: Any) -> list[Any]:
    """Of the two in a byte the upper one brings its sign along."""
    pairs = b.sext(_raw(b, address, 0), INTS)
    low = b.ashr(b.shl(pairs, _ints(28)), _ints(28))
    return [b.sitofp(code, VECTOR) for code in (low, b.ashr(pairs, _ints(4)))]


def _look_up_int4(b: Any, address: Any) -> list[Any]:
    pairs = b.sext(_raw(b, address, 0), INTS)
    low = _looked_up(b, pairs, [float(code) for code in (*range(8), *range(-8, 0))])
    return [low, b.sitofp(b.ashr(pairs, _ints(4)), VECTOR)]


def _load_e2m1(b: Any, address: Any) -> list[Any]:
    """A sign, two bits of exponent, one of mantissa; an exponent of 0 is read as 1 more than it is."""
    if LOOKS_UP:
        pairs, numbers = b.zext(_raw(b, address, 0), INTS), [*E2M1, *(-x for x in E2M1)]
        return [_looked_up(b, codes, numbers) for codes in (pairs, b.lshr(pairs, _ints(4)))]
    if CONVERTS:  # the bits of a number of 16 bits that is smaller by 2^14
        pairs = b.zext(_raw(b, address, 0), SHORTS)
        return [_half(b, pairs), _half(b, b.lshr(pairs, _shorts(4)))]
    pairs, found = b.zext(_raw(b, address, 0), INTS), []
    for code in (b.and_(pairs, _ints(15)), b.lshr(pairs, _ints(4))):
        size, sign = b.and_(code, _ints(7)), b.shl(b.and_(code, _ints(8)), _ints(28))
        small = b.icmp_unsigned("<", size, _ints(2))
        base = b.select(small, _ints(127 << 23), _ints(126 << 23))
        value = b.bitcast(b.add(b.shl(size, _ints(22)), base), VECTOR)
        value = b.fsub(value, b.select(small, _floats(1.0), _floats(0.0)))
        found.append(b.bitcast(b.or_(b.bitcast(value, INTS), sign), VECTOR))
    return found


E4M3_CODES = Codes(STRIP, 2.0**8 if CONVERTS else 1.0, False, _load_e4m3)
INT8_CODES = Codes(STRIP, 1.0, False, _load_int8)
INT4_CODES = Codes(LANES, 1.0, False, _look_up_int4 if LOOKS_UP else _load_int4)
INT8_WITH_ZEROS = INT8_CODES._replace(has_zeros=True)
# 12 rows of sums and a table are more than 32 registers
INT4_WITH_ZEROS = Codes(LANES, 1.0, True, _load_int4)
E2M1_CODES = Codes(LANES, 2.0**14 if CONVERTS and not LOOKS_UP else 1.0, False, _load_e2m1)


class _Strips(NamedTuple):
    """Strips side by side: addresses of the first one's codes, scales and zero points, if there are any."""

    builder: Any
    kind: Codes
    codes: Any
    scales: Any
    zeros: Any
    strip_bytes: Any
    span: Any
    count: Any
    codes_soon: Any  # of the next strips, which are fetched while these are used
    scales_soon: Any

    def each(self, strips: int, use: Callable[[Any, list[Any]], None]) -> None:
        """use(k, the weights of input k), for every input; scales are loaded once for a span."""
        b, kind = self.builder, self.kind
        num_spans = b.sdiv(b.add(self.count, b.sub(self.span, LONG(1))), self.span)
        beyond = b.sub(self.codes_soon, b.mul(self.count, LONG(kind.bytes_of_input)))
        with cgutils.for_range(b, num_spans) as spans:
            begin = b.mul(spans.index, self.span)
            rest = b.sub(self.count, begin)
            size = b.select(b.icmp_signed("<", rest, self.span), rest, self.span)
            scales_at = b.mul(spans.index, LONG(4 * STRIP))
            scales, zeros = self._scales(strips, scales_at)
            self._fetch_scales(strips, scales_at)
            with cgutils.for_range(b, size) as loop:
                k = b.add(begin, loop.index)
                at, weights = b.mul(k, LONG(kind.bytes_of_input)), []
                later = b.add(k, LONG(AHEAD // kind.bytes_of_input))
                start = b.select(b.icmp_signed("<", later, self.count), self.codes, beyond)
                for strip in range(strips):
                    own = b.add(at, b.mul(self.strip_bytes, LONG(strip)))
                    self._fetch(b.add(b.add(start, own), LONG(AHEAD)))
                    weights += kind.load(b, b.add(self.codes, own))
                if kind.has_zeros:
                    weights = [b.fsub(weight, zero) for weight, zero in zip(weights, zeros, strict=True)]
                use(k, [b.fmul(weight, scale) for weight, scale in zip(weights, scales, strict=True)])

    def _scales(self, strips: int, offset: Any) -> tuple[list[Any], list[Any]]:
        """And zero points."""
        b, kind = self.builder, self.kind
        scales, zeros = [], []
        for n in range(2 * strips):
            at = b.add(offset, b.mul(self.strip_bytes, LONG(n // 2)))
            scale = b.load(place(b, b.add(self.scales, at), LONG(n % 2 * LANES), VECTOR), align=4)
            scales.append(b.fmul(scale, _floats(kind.unit)) if kind.unit != 1 else scale)
            if kind.has_zeros:
                zeros.append(b.load(place(b, b.add(self.zeros, at), LONG(n % 2 * LANES), VECTOR), align=4))
        return scales, zeros

    def _fetch_scales(self, strips: int, offset: Any) -> None:
        """Of the next strips: nothing else brings what a span begins with."""
        b = self.builder
        starts = [self.scales_soon]
        if self.kind.has_zeros:
            starts.append(b.add(self.scales_soon, b.sub(self.zeros, self.scales)))
        for start in starts:
            for strip in range(strips):
                at = b.add(b.add(start, offset), b.mul(self.strip_bytes, LONG(strip)))
                for byte in range(0, 4 * STRIP, LINE):
                    self._fetch(b.add(at, LONG(byte)))

    def _fetch(self, address: Any) -> None:
        """What is wanted soon."""
        b, pointer, number = self.builder, BYTE.as_pointer(), ir.IntType(32)
        kinds = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(b.module, kinds, "llvm.prefetch.p0")
        b.call(function, [b.inttoptr(address, pointer), number(READ), number(NEAREST), number(1)])


class _Tile(NamedTuple):
    """Rows whose numbers lie DEPTH apart, and their sums."""

    builder: Any
    x: Any
    y: Any
    y_len: Any
    going_on: Any

    def emit(self, weights: _Strips, rows: int, strips: int) -> None:
        """sums = y if going_on else 0; sums += x times the weights; y = sums"""
        b, sums = self.builder, []
        for row in range(rows):
            for v in range(2 * strips):
                at = b.add(b.mul(self.y_len, LONG(row)), LONG(LANES * v))
                sums.append((place(b, self.y, at, VECTOR), cgutils.alloca_once(b, VECTOR)))
        with b.if_else(b.icmp_signed("!=", self.going_on, LONG(0))) as (taken_up, begun):
            with taken_up:
                for address, sum_ in sums:
                    b.store(b.load(address, align=4), sum_)
            with begun:
                for _, sum_ in sums:
                    b.store(_floats(0.0), sum_)

        def add(k: Any, weights: list[Any]) -> None:
            for n, (_, sum_) in enumerate(sums):
                x = self._splat(b.add(k, LONG(n // len(weights) * DEPTH)))
                b.store(b.call(self._fma(), [x, weights[n % len(weights)], b.load(sum_)]), sum_)

        weights.each(strips, add)
        for address, sum_ in sums:
            b.store(b.load(sum_), address, align=4)

    def _splat(self, offset: Any) -> Any:
        b, nothing = self.builder, ir.Constant(VECTOR, ir.Undefined)
        number = b.load(place(b, self.x, offset, F32), align=4)
        first = b.insert_element(nothing, number, ir.IntType(32)(0))
        return b.shuffle_vector(first, nothing, _ints(0))

    def _fma(self) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        return cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v16f32")


Table = Mapping[int, Codes]  # by the number with which a tile is called


def _cases(builder: Any, number: Any, cases: Mapping[int, Kind]) -> Iterator[Kind]:
    """The builder stands in the block of each case in turn, and behind all of them at the end."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for value, case in cases.items():
        block = builder.append_basic_block(f"case.{value}")
        switch.add_case(LONG(value), block)
        builder.position_at_end(block)
        yield case
        builder.branch(end)
    builder.position_at_end(end)


def tile_of(table: Table) -> Any:
    """A tile for every kind of codes in the table."""

    def tile(
        typing: Any,
        which: Any,  # in the table
        rows: Any,
        strips: Any,
        x: Any,  # address of the first row's first number; rows lie DEPTH numbers apart
        codes: Any,  # addresses of the first strip's first codes, scales and zero points, if there are any
        scales: Any,
        zeros: Any,
        strip_bytes: Any,  # from strip to strip
        span: Any,  # inputs that share a scale; the first begins a span
        count: Any,  # how many inputs
        y: Any,  # address of the first row's first sum
        y_len: Any,  # numbers from row to row
        going_on: Any,  # whether y has sums already
        codes_soon: Any,  # addresses of the codes and scales of the next strips
        scales_soon: Any,
    ) -> Any:
        """y[rows, 32 * strips] = or += x times weight, for one of SHAPES; nothing for others."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            which, rows, strips, x, codes, scales, zeros, strip_bytes, span, count, y, y_len, *last = args
            going_on, *soon = last
            shape = b.add(b.shl(strips, LONG(8)), rows)
            shapes = {(num_strips << 8) + num_rows: (num_rows, num_strips) for num_rows, num_strips in SHAPES}
            for kind in _cases(b, which, table):
                weights = _Strips(b, kind, codes, scales, zeros, strip_bytes, span, count, *soon)
                for num_rows, num_strips in _cases(b, shape, shapes):
                    _Tile(b, x, y, y_len, going_on).emit(weights, num_rows, num_strips)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 15), build

    return intrinsic(tile)


def widen_of(table: Table) -> Any:
    """Widens strips of every kind of codes in the table."""

    def widen(
        typing: Any,
        which: Any,  # in the table
        codes: Any,
        scales: Any,
        zeros: Any,
        span: Any,
        count: Any,
        target: Any,
        codes_soon: Any,
        scales_soon: Any,
    ) -> Any:
        """The weights of a strip for `count` inputs become fp32 at `target`."""

        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            which, codes, scales, zeros, span, count, target, *soon = args

            def put(k: Any, weights: list[Any]) -> None:
                for n, weight in enumerate(weights):
                    at = b.add(b.mul(k, LONG(STRIP)), LONG(n * LANES))
                    b.store(weight, place(b, target, at, VECTOR), align=4)

            for kind in _cases(b, which, table):
                _Strips(b, kind, codes, scales, zeros, LONG(0), span, count, *soon).each(1, put)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return intrinsic(widen)
