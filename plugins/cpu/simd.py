"""Vectors of 16 fp32 numbers for compiled kernels, as numba functions: what a register holds, spelled out.

numba's own vectoriser must suppose that any two arrays overlap, so it keeps no sum in a register; these
functions say which numbers live there. Every lane is IEEE fp32 and fused only where `fma` is called, so bits
depend neither on the CPU nor on how wide its registers are (LLVM cuts a vector into what there is).
Memory is given by its address; an offset counts numbers behind it, unchecked.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.ir.instructions import LoadInstr
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, register_model

from hemiola.plugins.cpu.registers import LANES, REGISTERS

MOST_ARGUMENTS = 30  # of a kernel
CROWDED = REGISTERS.vectors < 2 * LANES  # registers do not hold 16 vectors and what is done with them
intrinsic: Any = extending.intrinsic  # of a function that builds code: calls of it look different
F32, F64, I32 = ir.FloatType(), ir.DoubleType(), ir.IntType(32)
LONG, HALF = ir.IntType(64), ir.IntType(16)
VECTOR, INTS = (ir.VectorType(kind, LANES) for kind in (F32, I32))


class Vector(types.Type):
    """The type of a register's content."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


vector = Vector()
number = types.float32


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def _llvm(builder: Any, name: str, args: Any) -> Any:
    signature = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def place(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to a number or a vector, `offset` numbers behind an address."""
    number_ = kind.element if isinstance(kind, ir.VectorType) else kind
    start = builder.gep(builder.inttoptr(address, number_.as_pointer()), [offset])
    return builder.bitcast(start, kind.as_pointer())


def _reader(name: str, kind: Any, align: int, result: Any, finish: Any, meaning: str) -> Any:
    def function(typing: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return finish(builder, builder.load(place(builder, args[0], args[1], kind), align=align))

        return result(types.int64, types.int64), build

    function.__name__, function.__doc__ = name, meaning
    return intrinsic(function)


def _writer(name: str, kind: Any, align: int, given: Any, begin: Any, meaning: str) -> Any:
    def function(typing: Any, address: Any, offset: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(begin(builder, args[2]), place(builder, args[0], args[1], kind), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, given), build

    function.__name__, function.__doc__ = name, meaning
    return intrinsic(function)


def _same(builder: Any, value: Any) -> Any:
    return value


def _widened(builder: Any, value: Any) -> Any:
    """bfloat16 is the upper half of fp32."""
    return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)


def _extended(builder: Any, value: Any) -> Any:
    return builder.sext(value, LONG)


def _cut(builder: Any, value: Any) -> Any:
    return builder.trunc(value, I32)


load = _reader("load", VECTOR, 4, vector, _same, "The 16 numbers behind an address and an offset.")
store = _writer("store", VECTOR, 4, vector, _same, "Put a vector there.")
get = _reader("get", F32, 4, number, _same, "The number there.")
put = _writer("put", F32, 4, number, _same, "Put a number there.")
get_half = _reader("get_half", HALF, 2, number, _widened, "A bfloat16 number, widened.")
get_byte = _reader("get_byte", ir.IntType(8), 1, types.int64, _extended, "An int8 number.")
get_int = _reader("get_int", I32, 4, types.int64, _extended, "An int32 number.")
put_int = _writer("put_int", I32, 4, types.int64, _cut, "Put an int32 number.")
get_double = _reader("get_double", F64, 8, types.float64, _same, "An fp64 number.")
put_double = _writer("put_double", F64, 8, types.float64, _same, "Put an fp64 number.")
get_long = _reader("get_long", LONG, 8, types.int64, _same, "An int64 number.")
put_long = _writer("put_long", LONG, 8, types.int64, _same, "Put an int64 number.")


@intrinsic
def invoke(typing: Any, function: Any, item: Any, scratch: Any, arguments: Any) -> Any:
    """function(item, scratch, *arguments): an address, two numbers, and the address of MOST_ARGUMENTS more.

    C lets a caller pass more than a function takes (it cleans up itself, on x86-64 and on ARM).
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, item, scratch, arguments = args
        places = [place(builder, arguments, LONG(n), LONG) for n in range(MOST_ARGUMENTS)]
        kind = ir.FunctionType(ir.VoidType(), [LONG] * (2 + MOST_ARGUMENTS))
        pointer = builder.inttoptr(function, kind.as_pointer())
        builder.call(pointer, [item, scratch, *(builder.load(place) for place in places)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), build


@intrinsic
def from_bits(typing: Any, bits: Any) -> Any:
    """The fp32 number with these 32 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return number(types.int64), build


@intrinsic
def first(typing: Any, a: Any) -> Any:
    """The first lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], I32(0))

    return number(vector), build


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """The same number in every lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), args[0], I32(0))
        return builder.shuffle_vector(
            first, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, [0] * LANES)
        )

    return vector(number), build


class _AlwaysLoad(LoadInstr):
    """A load that LLVM leaves where it is."""

    def descr(self, buf: list[str]) -> None:
        parts: list[str] = []
        super().descr(parts)
        buf.append("".join(parts).replace("load", "load volatile", 1))


@intrinsic
def constant(typing: Any, value: Any) -> Any:
    """The same number in every lane, known when this is compiled.

    Where a loop has more of them than there are registers, LLVM would keep the rest on the stack.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return loaded(builder, float(np.float32(args[0].constant)))

    return vector(types.float64), build


def loaded(builder: Any, value: int | float) -> Any:
    """Code of `constant`: a vector of floats, or of int32."""
    element = F32 if isinstance(value, float) else I32
    if not CROWDED:
        return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)
    kind = ir.VectorType(element, REGISTERS.lanes)
    place = cgutils.global_constant(builder, "constant", ir.Constant(kind, [value] * REGISTERS.lanes))
    builder._insert(found := _AlwaysLoad(builder.block, place))
    lanes = ir.Constant(INTS, [lane % REGISTERS.lanes for lane in range(LANES)])
    return builder.shuffle_vector(found, ir.Constant(kind, ir.Undefined), lanes)


@intrinsic
def settle(typing: Any) -> Any:
    """What was stored before is loaded from memory after this, where registers would not hold all of it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if CROWDED:
            builder.fence("seq_cst", "singlethread")  # binds LLVM, costs nothing
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _llvm(builder, "llvm.fma.v16f32", args)

    return vector(vector, vector, vector), build


def _binary(emit: str, meaning: str) -> Any:
    def function(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, emit)(*args)

        return vector(vector, vector), build

    function.__name__, function.__doc__ = emit, meaning
    return intrinsic(function)


add = _binary("fadd", "a + b")
sub = _binary("fsub", "a - b")
mul = _binary("fmul", "a * b")
div = _binary("fdiv", "a / b")


@intrinsic
def largest(typing: Any, a: Any, b: Any) -> Any:
    """The larger of a and b; a where one is NaN."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">", *args), *args)

    return vector(vector, vector), build


@intrinsic
def smallest(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of a and b; a where one is NaN."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_unordered("<", *args), *args)

    return vector(vector, vector), build


@intrinsic
def floor(typing: Any, a: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _llvm(builder, "llvm.floor.v16f32", args)

    return vector(vector), build


@intrinsic
def power_of_two(typing: Any, a: Any) -> Any:
    """2^a for whole numbers from -126 to 127; 0 for -127, inf for 128."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.fptosi(args[0], INTS)
        biased = builder.add(whole, ir.Constant(INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(INTS, [23] * LANES)), VECTOR)

    return vector(vector), build


@intrinsic
def first_lanes(typing: Any, value: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of value, and `other` in the rest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, count, other = args
        count = builder.trunc(count, I32)
        first = builder.insert_element(ir.Constant(INTS, ir.Undefined), count, I32(0))
        limit = builder.shuffle_vector(first, ir.Constant(INTS, ir.Undefined), ir.Constant(INTS, [0] * LANES))
        inside = builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), limit)
        return builder.select(inside, value, other)

    return vector(vector, types.int64, vector), build


@intrinsic
def where_less(typing: Any, a: Any, b: Any, value: Any, other: Any) -> Any:
    """Lanes of value where a < b, of other where not."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), *args[2:])

    return vector(vector, vector, vector, vector), build


@intrinsic
def pairs(typing: Any, a: Any, b: Any) -> Any:
    """Sums of neighbouring lanes, first of a, then of b. Four rounds turn 16 vectors into their sums."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        even = ir.Constant(INTS, list(range(0, 2 * LANES, 2)))
        odd = ir.Constant(INTS, list(range(1, 2 * LANES, 2)))
        return builder.fadd(builder.shuffle_vector(*args, even), builder.shuffle_vector(*args, odd))

    return vector(vector, vector), build


def _fold(emit: Any) -> Any:
    """Lanes i and i + 8, then i and i + 4, and so on: one order, always."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            half = ir.VectorType(I32, width)
            low = builder.shuffle_vector(value, value, ir.Constant(half, list(range(width))))
            high = builder.shuffle_vector(value, value, ir.Constant(half, list(range(width, 2 * width))))
            value = emit(builder, low, high)
        return builder.extract_element(value, I32(0))

    return build


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes."""
    return number(vector), _fold(lambda builder, low, high: builder.fadd(low, high))


@intrinsic
def peak(typing: Any, a: Any) -> Any:
    """The largest lane."""

    def pick(builder: Any, low: Any, high: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", low, high), low, high)

    return number(vector), _fold(pick)


f32 = np.float32
inlined: Any = numba.njit(inline="always")


@inlined
def sums_of(array, at):
    """The vector of the sums of 16 vectors that lie one behind the other."""
    settle()
    a = _eight(array, at)
    settle()
    return pairs(a, _eight(array, at + 8 * LANES))


@inlined
def _eight(array, at):
    a, b = load(array, at), load(array, at + 16)
    c, d = load(array, at + 32), load(array, at + 48)
    e, f = load(array, at + 64), load(array, at + 80)
    g, h = load(array, at + 96), load(array, at + 112)
    return pairs(pairs(pairs(a, b), pairs(c, d)), pairs(pairs(e, f), pairs(g, h)))


@inlined
def copy(source, source_at, target, target_at, size):
    """`size` numbers, a multiple of 16."""
    for i in range(0, size, LANES):
        store(target, target_at + i, load(source, source_at + i))


@inlined
def load_some(base, at, count, room):
    """The first `count` numbers from `at` on, if they are fewer than 16 by way of room for 16, then zeros."""
    if count < LANES:
        store(room, 0, splat(f32(0.0)))
        for i in range(count):
            put(room, i, get(base, at + i))
        return load(room, 0)
    return load(base, at)


@inlined
def store_some(base, at, count, value, room):
    """The first `count` lanes, if they are fewer than 16 by way of room for 16."""
    if count < LANES:
        store(room, 0, value)
        for i in range(count):
            put(base, at + i, get(room, i))
    else:
        store(base, at, value)


@inlined
def clear(base, at, size):
    """`size` zeros, a multiple of 16."""
    for i in range(0, size, LANES):
        store(base, at + i, splat(f32(0.0)))
