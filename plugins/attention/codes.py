"""Codes of 3 and 4 bits in the registers of a CPU: 16 numbers at a time, as pages.py and reference.py say.

Addresses are of bytes here. 16 codes are two words of 8, little endian, the first code in the lowest bits.
"""

from typing import Any

from llvmlite import ir
from numba.core import types

from hemiola.plugins.attention.pages import CENTRES, TINY, borders
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import (
    F32,
    HALF,
    I32,
    INTS,
    LANES,
    LONG,
    VECTOR,
    add,
    div,
    f32,
    intrinsic,
    largest,
    load,
    loaded,
    mul,
    number,
    peak,
    smallest,
    splat,
    store,
    sub,
    total,
    vector,
)

EIGHT, FP16 = LANES // 2, ir.HalfType()
BYTE_POINTER = ir.IntType(8).as_pointer()


def _ints(values: list[int]) -> Any:
    return ir.Constant(INTS, values)


def _at(b: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer, so many bytes behind an address."""
    return b.inttoptr(b.add(address, offset), kind.as_pointer())


def _read(b: Any, bits: int, address: Any, offset: Any) -> Any:
    """The 16 codes there, as int32."""
    low = b.zext(b.load(_at(b, address, offset, I32), align=1), LONG)
    kind = I32 if bits == 4 else HALF
    high = b.zext(b.load(_at(b, address, b.add(offset, LONG(4)), kind), align=1), LONG)
    both = b.or_(low, b.shl(high, LONG(32)))
    words = [b.trunc(b.lshr(both, LONG(n * EIGHT * bits)), I32) for n in range(2)]
    pair = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for n, word in enumerate(words):
        pair = b.insert_element(pair, word, I32(n))
    spread = b.shuffle_vector(pair, pair, _ints([lane // EIGHT for lane in range(LANES)]))
    shifted = b.lshr(spread, _ints([lane % EIGHT * bits for lane in range(LANES)]))
    return b.and_(shifted, _ints([2**bits - 1] * LANES))


def _write(b: Any, bits: int, codes: Any, address: Any, offset: Any) -> None:
    """16 codes go there."""
    parts = b.shl(codes, _ints([lane % EIGHT * bits for lane in range(LANES)]))
    width = EIGHT
    while width > 1:  # neighbours together, in both halves
        width //= 2
        apart = [lane // EIGHT * EIGHT + (lane + width) % EIGHT for lane in range(LANES)]
        parts = b.or_(parts, b.shuffle_vector(parts, parts, _ints(apart)))
    low, high = (b.zext(b.extract_element(parts, I32(n * EIGHT)), LONG) for n in range(2))
    both = b.or_(low, b.shl(high, LONG(EIGHT * bits)))
    b.store(b.trunc(both, I32), _at(b, address, offset, I32), align=1)
    kind = I32 if bits == 4 else HALF
    rest = b.trunc(b.lshr(both, LONG(32)), kind)
    b.store(rest, _at(b, address, b.add(offset, LONG(4)), kind), align=1)


def _centres(b: Any, bits: int, codes: Any) -> Any:
    """What keys' codes stand for: sizes mirror each other around the middle."""
    half = 2 ** (bits - 1)
    is_low = b.icmp_unsigned("<", codes, _ints([half] * LANES))
    mirror = _ints([half - 1] * LANES)
    rank = b.and_(b.xor(codes, b.select(is_low, mirror, _ints([0] * LANES))), mirror)
    found = [loaded(b, float(centre)) for centre in CENTRES[bits]]
    for bit in range(bits - 1):
        odd = b.icmp_unsigned("!=", b.and_(rank, _ints([1 << bit] * LANES)), _ints([0] * LANES))
        found = [b.select(odd, found[n + 1], found[n]) for n in range(0, len(found), 2)]
    sign = b.select(is_low, _ints([-(2**31)] * LANES), _ints([0] * LANES))
    return b.bitcast(b.or_(b.bitcast(found[0], INTS), sign), VECTOR)


def _loader(bits: int, finish: Any, meaning: str) -> Any:
    def function(typing: Any, address: Any, offset: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return finish(b, bits, _read(b, bits, *args))

        return vector(types.int64, types.int64), build

    function.__name__, function.__doc__ = f"{finish.__name__}_{bits}", meaning
    return intrinsic(function)


def _counted(b: Any, bits: int, codes: Any) -> Any:
    return b.uitofp(codes, VECTOR)


def _storer(bits: int, begin: Any, meaning: str) -> Any:
    def function(typing: Any, address: Any, offset: Any, value: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
            _write(b, bits, begin(b, bits, args[2]), args[0], args[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, vector), build

    function.__name__, function.__doc__ = f"{begin.__name__}_{bits}", meaning
    return intrinsic(function)


def _ranked(b: Any, bits: int, value: Any) -> Any:
    """How many borders are not above each number; none for NaN."""
    count = _ints([0] * LANES)
    for border in borders(bits):
        reached = b.fcmp_ordered(">=", value, loaded(b, float(border)))
        count = b.add(count, b.zext(reached, INTS))
    return count


def _cut(b: Any, bits: int, value: Any) -> Any:
    """Whole parts between 0 and the largest code; 0 for NaN."""
    most, zero = loaded(b, float(2**bits - 1)), loaded(b, 0.0)
    value = b.select(b.fcmp_ordered(">", value, zero), value, zero)
    value = b.select(b.fcmp_ordered("<", value, most), value, most)
    return b.fptosi(value, INTS)


load_centres_3, load_centres_4 = (_loader(n, _centres, "What 16 codes of a key stand for.") for n in (3, 4))
load_counts_3, load_counts_4 = (_loader(n, _counted, "16 codes as numbers.") for n in (3, 4))
store_ranks_3, store_ranks_4 = (_storer(n, _ranked, "Codes of 16 numbers of a key.") for n in (3, 4))
store_steps_3, store_steps_4 = (_storer(n, _cut, "16 numbers of steps, as codes.") for n in (3, 4))


@intrinsic
def get_fp16(typing: Any, address: Any, offset: Any) -> Any:
    """The fp16 number so many bytes behind an address."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fpext(b.load(_at(b, args[0], args[1], FP16), align=1), F32)

    return number(types.int64, types.int64), build


@intrinsic
def put_fp16(typing: Any, address: Any, offset: Any, value: Any) -> Any:
    """Put the nearest fp16 number there."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(b.fptrunc(args[2], FP16), _at(b, args[0], args[1], FP16), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, number), build


@intrinsic
def _root(typing: Any, value: Any) -> Any:
    """The square root, rounded once."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function = b.module.declare_intrinsic("llvm.sqrt", [F32])
        return b.call(function, [args[0]])

    return number(number), build


@intrinsic
def _turned(typing: Any, value: Any) -> Any:
    """16 numbers times the Hadamard matrix: steps of 1, 2, 4 and 8."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        value, step = args[0], 1
        while step < LANES:
            other = b.shuffle_vector(value, value, _ints([lane ^ step for lane in range(LANES)]))
            added, less = b.fadd(value, other), b.fsub(other, value)
            chosen = [lane + (LANES if lane & step else 0) for lane in range(LANES)]
            value, step = b.shuffle_vector(added, less, _ints(chosen)), 2 * step
        return value

    return vector(vector), build


@helper
def rotate(numbers, depth):
    """In place, times the Hadamard matrix; see reference.rotated."""
    for d in range(0, depth, LANES):
        store(numbers, d, _turned(load(numbers, d)))
    step = LANES
    while step < depth:
        for begin in range(0, depth, 2 * step):
            for d in range(begin, begin + step, LANES):
                low, high = load(numbers, d), load(numbers, d + step)
                store(numbers, d, add(low, high))
                store(numbers, d + step, sub(low, high))
        step *= 2


@helper
def _tree_of_squares(numbers, room, depth):
    """The sum of the squares of `depth` numbers, halves upon each other; room for as many."""
    for d in range(0, depth, LANES):
        value = load(numbers, d)
        store(room, d, mul(value, value))
    half = depth // 2
    while half >= LANES:
        for d in range(0, half, LANES):
            store(room, d, add(load(room, d), load(room, d + half)))
        half //= 2
    return total(load(room, 0))


@helper
def store_key(bits, k, at, depth, codes, notes, room):
    """A key's codes and norm go to these addresses; room for 8 bytes times the numbers of a head."""
    other = room + 4 * depth
    for d in range(0, depth, LANES):
        store(room, d, load(k, at + d))
    norm = _root(_tree_of_squares(room, other, depth))
    for d in range(0, depth, LANES):
        store(room, d, div(load(room, d), splat(norm + f32(TINY))))
    rotate(room, depth)
    for d in range(0, depth, LANES):
        to = d // 8 * bits
        if bits == 4:
            store_ranks_4(codes, to, load(room, d))
            store(room, d, load_centres_4(codes, to))
        else:
            store_ranks_3(codes, to, load(room, d))
            store(room, d, load_centres_3(codes, to))
    put_fp16(notes, 0, norm / _root(_tree_of_squares(room, other, depth)))


@helper
def store_value(bits, v, at, depth, codes, notes):
    """A value's codes, its step and its least number."""
    low, high, sound = load(v, at), load(v, at), splat(f32(0.0))
    for d in range(0, depth, LANES):
        value = load(v, at + d)
        low, high = smallest(low, value), largest(high, value)
        sound = add(sound, sub(value, value))
    spoilt = total(sound)  # NaN where a number is none, or has no end; else 0
    least, most = spoilt - peak(sub(splat(f32(0.0)), low)), peak(high)
    step = (most - least) / f32(2**bits - 1)
    step = (step if step > f32(TINY) else f32(TINY)) + spoilt
    for d in range(0, depth, LANES):
        steps = add(div(sub(load(v, at + d), splat(least)), splat(step)), splat(f32(0.5)))
        if bits == 4:
            store_steps_4(codes, d // 2, steps)
        else:
            store_steps_3(codes, d // 8 * 3, steps)
    put_fp16(notes, 0, step)
    put_fp16(notes, 2, least)


@helper
def load_key(bits, codes, notes, depth, keys, target):
    """A rotated key as fp32."""
    norm = splat(get_fp16(notes, 0))
    for d in range(0, depth, LANES):
        at = d // 8 * bits
        centre = load_centres_4(codes, at) if bits == 4 else load_centres_3(codes, at)
        store(keys, target + d, mul(centre, norm))


@helper
def load_value(bits, codes, notes, depth, values, target):
    """A value as fp32."""
    step, least = splat(get_fp16(notes, 0)), splat(get_fp16(notes, 2))
    for d in range(0, depth, LANES):
        at = d // 8 * bits
        count = load_counts_4(codes, at) if bits == 4 else load_counts_3(codes, at)
        store(values, target + d, add(mul(count, step), least))
