"""The compiled kernels' vector functions against numpy, through small functions compiled here."""

from collections.abc import Callable

import numba
import numpy as np
import pytest

from hemiola.plugins.cpu import jit, simd
from hemiola.plugins.cpu.simd import LANES

F32 = np.float32
Function = Callable[..., np.ndarray]


def mapped(function: Callable) -> Function:
    """A function of vectors, over arrays of any length."""

    @numba.njit
    def one(a, out):
        for i in range(0, a.size, LANES):
            simd.store(out, i, function(simd.load(a, i)))

    @numba.njit
    def two(a, b, out):
        for i in range(0, a.size, LANES):
            simd.store(out, i, function(simd.load(a, i), simd.load(b, i)))

    def run(*arrays: np.ndarray) -> np.ndarray:
        size = len(arrays[0])
        padded = [np.zeros(-(-size // LANES) * LANES, F32) for _ in arrays]
        for target, array in zip(padded, arrays, strict=True):
            target[:size] = array
        out = np.full(padded[0].shape, np.nan, F32)
        (one if len(arrays) == 1 else two)(*padded, out)
        return out[:size]

    return run


exp, silu, sigmoid, softplus = (mapped(f) for f in (simd.exp, simd.silu, simd.sigmoid, simd.softplus))
SMOOTH = pytest.mark.parametrize(
    "function", [exp, silu, sigmoid, softplus], ids=["exp", "silu", "sigmoid", "softplus"]
)


def ulps(ours: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance from the exact fp64 values in units of the last place of an fp32 number."""
    return np.abs(ours.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(F32))


def numbers(low: float, high: float) -> np.ndarray:
    """Dense, near 0, tiny, and on both sides of where exp's power of two steps."""
    rng = np.random.default_rng(0)
    halves = (np.arange(-125, 127) + 0.5) * np.log(2)
    parts = (
        np.linspace(low, high, 2_000_001),
        rng.standard_normal(200_000),
        10.0 ** rng.uniform(-30, 0, 100_000) * rng.choice([-1, 1], 100_000),
        *(np.nextafter(sign * halves.astype(F32), F32(side)) for side in (-100, 100) for sign in (-1, 1)),
    )
    return np.concatenate(parts).astype(F32).clip(low, high)


EXACT = {
    "exp": (exp, -87, 88, np.exp, 2),
    "sigmoid": (
        sigmoid,
        -87,
        200,
        lambda x: 1 / (1 + np.exp(-x)),
        4,
    ),  # of exp, of the sum and of the quotient
    "silu": (silu, -80, 200, lambda x: x / (1 + np.exp(-x)), 4),
    "softplus": (softplus, -87, 200, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 3),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_few_units_of_the_last_place(name: str) -> None:
    function, low, high, exact, bound = EXACT[name]
    x = numbers(low, high)
    assert ulps(function(x), exact(x.astype(np.float64))).max() <= bound


def test_softplus_near_zero_and_without_bound() -> None:
    x = np.array([0, -0.0, np.inf, -np.inf, 1e30, -1e30, 88, 200, -104], F32)
    assert softplus(x).tolist() == [F32(np.log(2)), F32(np.log(2)), np.inf, 0, F32(1e30), 0, 88, 200, 0]
    between = softplus(np.linspace(-89, -87, 10_001).astype(F32))
    assert (between >= 0).all() and (between[1:] >= between[:-1]).all()


def test_sigmoid_without_bound() -> None:
    assert sigmoid(np.array([0, -0.0, np.inf, -np.inf, 1e30, -1e30, 20], F32)).tolist() == [
        0.5,
        0.5,
        1,
        0,
        1,
        0,
        1,
    ]


def test_exp_of_zero_is_one() -> None:
    assert (exp(np.array([0.0, -0.0], F32)) == 1).all()


def test_exp_of_what_is_too_small_or_too_large() -> None:
    low = -np.array([88.1, 89, 100, 104, 1e3, 1e30, np.inf], F32)
    high = np.array([88.8, 89, 100, 1e3, 1e30, np.inf], F32)
    assert (exp(low) == 0).all() and not np.signbit(exp(low)).any()
    assert (exp(high) == np.inf).all()
    for between in (np.linspace(-88.1, -87, 10_001), np.linspace(88, 88.8, 10_001)):
        y = exp(between.astype(F32))
        assert (y >= 0).all() and (y[1:] >= y[:-1]).all()


@SMOOTH
def test_nan_stays_nan_in_its_lane(function: Function) -> None:
    x = np.linspace(-3, 3, LANES).astype(F32)
    clean = function(x)
    for lane in range(LANES):
        dirty = x.copy()
        dirty[lane] = np.nan
        assert (np.isnan(function(dirty)) == (np.arange(LANES) == lane)).all()
        assert (np.delete(function(dirty), lane) == np.delete(clean, lane)).all()


def test_silu_without_bound() -> None:
    assert silu(np.array([200, -200, 0, -0.0, 1e4, -1e4], F32)).tolist() == [200, 0, 0, 0, 1e4, 0]


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "largest": np.maximum,
    "smallest": np.minimum,
}


@pytest.mark.parametrize("name", BINARY)
def test_two_vectors(name: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 5 * LANES)).astype(F32)
    assert (mapped(getattr(simd, name))(a, b) == BINARY[name](a, b)).all()


def test_largest_and_smallest_keep_the_first_of_nan() -> None:
    a, b = np.array([1, np.nan, 1], F32), np.array([np.nan, 1, 2], F32)
    np.testing.assert_array_equal(mapped(simd.largest)(a, b), np.array([1, np.nan, 2], F32))
    np.testing.assert_array_equal(mapped(simd.smallest)(a, b), np.array([1, np.nan, 1], F32))


def test_floor_and_powers_of_two() -> None:
    x = np.array([-2.5, -2, -0.5, -0.0, 0.5, 126.99, -126], F32)
    assert (mapped(simd.floor)(x) == np.floor(x)).all()
    whole = np.arange(-126, 128)
    assert (mapped(simd.power_of_two)(whole.astype(F32)) == np.ldexp(F32(1), whole)).all()
    assert mapped(simd.power_of_two)(np.array([-127, 128], F32)).tolist() == [0, np.inf]


@numba.njit
def fuse(a, b, c, out):
    simd.store(out, 0, simd.fma(simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)))


def test_fma_rounds_once_and_a_product_with_a_sum_twice() -> None:
    """LLVM may not fuse what was not asked for: bits would depend on the CPU."""
    a = (1 + np.arange(1, LANES + 1) * 2.0**-20).astype(F32)
    b = (1 - np.arange(1, LANES + 1) * 2.0**-19).astype(F32)
    c, out = -(a * b), np.empty(LANES, F32)
    fuse(a, b, c, out)
    exact = a.astype(np.float64) * b + c  # 24 + 24 bits fit into 53
    assert (out == exact.astype(F32)).all() and exact.any()

    @numba.njit
    def apart(a, b, c, out):
        simd.store(out, 0, simd.add(simd.mul(simd.load(a, 0), simd.load(b, 0)), simd.load(c, 0)))

    apart(a, b, c, out)
    assert (out == 0).all()


@numba.njit
def fold(a, out):
    simd.put(out, 0, simd.total(simd.load(a, 0)))
    simd.put(out, 1, simd.peak(simd.load(a, 0)))
    simd.put(out, 2, simd.first(simd.load(a, 0)))
    simd.store(out, LANES, simd.splat(simd.get(a, 3)))


def test_total_peak_first_and_splat() -> None:
    rng = np.random.default_rng(2)
    out = np.empty(2 * LANES, F32)
    for _ in range(100):
        a = rng.standard_normal(LANES).astype(F32)
        fold(a, out)
        halves = a  # lanes i and i + 8, then i and i + 4, ..
        while len(halves) > 1:
            halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
        assert out[0] == halves[0]
        assert (out[1], out[2]) == (a.max(), a[0])
        assert (out[LANES:] == a[3]).all()
    for lane in range(LANES):
        a = np.full(LANES, -np.inf, F32)
        a[lane] = lane - 20
        fold(a, out)
        assert out[1] == lane - 20


@numba.njit
def sum_all(array, at, out):
    simd.store(out, 0, simd.sums_of(array, at))


def test_pairs_and_sums_of_sixteen_vectors() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, LANES)).astype(F32)
    both = np.concatenate([a, b])
    assert (mapped(simd.pairs)(a, b) == both[0::2] + both[1::2]).all()
    values, out = rng.standard_normal(7 + LANES * LANES).astype(F32), np.empty(LANES, F32)
    folded = values[7:].reshape(LANES, LANES)
    while folded.shape[1] > 1:
        folded = folded[:, 0::2] + folded[:, 1::2]
    sum_all(values, 7, out)
    assert (out == folded[:, 0]).all()
    sum_all(values.ctypes.data, 7, out)
    assert (out == folded[:, 0]).all()


@numba.njit
def keep(a, count, other, out):
    simd.store(out, 0, simd.first_lanes(simd.load(a, 0), count, simd.load(other, 0)))


@pytest.mark.parametrize("count", [-1000, -1, 0, 1, 7, 15, 16, 17, 1000])
def test_first_lanes(count: int) -> None:
    """What is cut off may be NaN."""
    a, other = np.arange(LANES, dtype=F32), np.full(LANES, -np.inf, F32)
    a[max(count, 0) :] = np.nan
    out = np.empty(LANES, F32)
    keep(a, count, other, out)
    kept = np.arange(LANES) < count
    assert (out == np.where(kept, np.arange(LANES), -np.inf)).all()


@numba.njit
def move(source, source_at, target, target_at):
    simd.store(target, target_at, simd.load(source, source_at))


@numba.njit
def move_one(source, source_at, target, target_at):
    simd.put(target, target_at, simd.get(source, source_at))


@numba.njit
def move_many(source, source_at, target, target_at):
    simd.copy(source, source_at, target, target_at, 3 * LANES)


@pytest.mark.parametrize("function,size", [(move, LANES), (move_one, 1), (move_many, 3 * LANES)])
@pytest.mark.parametrize("by_address", [False, True], ids=["array", "address"])
def test_memory_is_touched_where_it_was_asked_for(function: Function, size: int, by_address: bool) -> None:
    """At places that no register's width divides; an offset counts numbers, whatever the array's shape."""
    for source_at, target_at in ((0, 0), (3, 11), (21, 1)):
        source = np.arange(100, dtype=F32).reshape(4, 25)
        target = np.full((10, 10), -1, F32)
        expected = target.copy().reshape(-1)
        expected[target_at : target_at + size] = np.arange(source_at, source_at + size)
        pair = (source.ctypes.data, target.ctypes.data) if by_address else (source, target)
        function(pair[0], source_at, pair[1], target_at)
        assert (target.reshape(-1) == expected).all()


def test_offsets_beyond_32_bits_and_before_the_start() -> None:
    a, out = np.arange(64, dtype=F32), np.zeros(64, F32)
    far = 1 << 33
    move(a.ctypes.data - 4 * far, far + 5, out.ctypes.data + 4 * far, 2 - far)
    assert (out[2 : 2 + LANES] == a[5 : 5 + LANES]).all()


@numba.njit
def integers(short, long, out):
    for i in range(5):
        out[0, i] = simd.get_int(short, i)
        out[1, i] = simd.get_long(long, i)
        simd.put_int(short, i + 5, simd.get_int(short, i) - 1)
        simd.put_long(long, i + 5, simd.get_long(long, i) - 1)


def test_integers_keep_their_sign_and_wrap() -> None:
    short = np.array([0, 1, -1, 2**31 - 1, -(2**31), *[7] * 6], np.int32)
    long = np.array([0, 1, -1, 2**63 - 1, -(2**63), *[7] * 6], np.int64)
    out = np.empty((2, 5), np.int64)
    integers(short.ctypes.data, long.ctypes.data, out)
    assert (out == [short[:5], long[:5]]).all()
    assert short[5:].tolist() == [-1, 0, -2, 2**31 - 2, 2**31 - 1, 7]
    assert long[5:].tolist() == [-1, 0, -2, 2**63 - 2, 2**63 - 1, 7]


@numba.njit
def widen(halves, out):
    simd.store(out, 0, simd.load_bfloat16(halves, 3))
    for i in range(LANES):
        simd.put(out, LANES + i, simd.get_half(halves, 3 + i))


def test_bfloat16_is_widened() -> None:
    """Every kind of number, NaN, infinities and subnormals too."""
    bits = np.array([0, 0x8000, 0x3F80, 0xC2F7, 0x7F80, 0xFF80, 0x7FC0, 1, 0x807F, 0x7F7F], np.uint16)
    halves = np.resize(bits, 3 + LANES)
    out = np.empty(2 * LANES, F32)
    widen(halves.ctypes.data, out)
    assert (out.view(np.uint32) == np.tile(halves[3:].astype(np.uint32) << 16, 2)).all()


@numba.njit
def some(source, target, at, count, room):
    simd.store_some(target, at, count, simd.load_some(source, at, count, room), room)


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 100])
def test_some_lanes_are_loaded_and_stored(count: int) -> None:
    """What lies behind them is neither read nor touched."""
    source, target, room = np.arange(40, dtype=F32), np.full(40, -1, F32), np.full(LANES, np.nan, F32)
    num = min(count, LANES)
    source[5 + num :] = np.nan
    expected = target.copy()
    expected[5 : 5 + num] = source[5 : 5 + num]
    some(source.ctypes.data, target.ctypes.data, 5, count, room.ctypes.data)
    assert (target == expected).all()


@numba.njit
def some_then_zeros(source, count, room, out):
    simd.store(out, 0, simd.load_some(source, 0, count, room))
    simd.clear(out, LANES, LANES)


@pytest.mark.parametrize("count", [1, 15, 16])
def test_lanes_behind_some_are_zeros(count: int) -> None:
    source, room, out = (
        np.arange(1, 17, dtype=F32),
        np.full(LANES, np.nan, F32),
        np.full(3 * LANES, np.nan, F32),
    )
    some_then_zeros(source.ctypes.data, count, room.ctypes.data, out)
    assert (out[:LANES] == np.where(np.arange(LANES) < count, source, 0)).all()
    assert (out[LANES : 2 * LANES] == 0).all() and np.isnan(out[2 * LANES :]).all()


@numba.njit
def multiply(weight, num_outputs, num_inputs, x, out, products):
    simd.dots(
        weight,
        7,
        num_outputs,
        num_inputs,
        x,
        3,
        out,
        5,
        products,
    )


@pytest.mark.parametrize("num_outputs,num_inputs", [(16, 16), (48, 64), (16, 80), (32, 208)])
def test_dots(num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal(7 + num_outputs * num_inputs).astype(F32)
    x, out = rng.standard_normal(3 + num_inputs).astype(F32), np.full(5 + num_outputs + 1, 9, F32)
    multiply(weight, num_outputs, num_inputs, x, out, np.full(LANES * LANES, np.nan, F32))
    exact = weight[7:].reshape(num_outputs, num_inputs).astype(np.float64) @ x[3:]
    assert np.abs(out[5:-1] - exact).max() < 1e-5 and out[-1] == out[4] == 9


@numba.njit
def number(bits, out):
    simd.put(out, 0, simd.from_bits(bits))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-5, -1.5, 0.08838834764831845, 3e38, -np.inf])
def test_a_number_passes_as_its_bits(value: float) -> None:
    out = np.empty(1, F32)
    number(jit.bits(value), out)
    assert out.tobytes() == F32(value).tobytes()


def told(item, scratch, a, b, out):
    simd.put_long(out, item, 100 * a + 10 * b + scratch)


def told_nothing(item, scratch):
    simd.put_long(scratch, item, item)


@numba.njit
def pass_on(function, item, scratch, arguments):
    simd.invoke(function, item, scratch, arguments)


def test_a_function_gets_its_arguments_and_no_others() -> None:
    """The caller always passes MOST_ARGUMENTS."""
    out, arguments = np.zeros(4, np.int64), np.full(simd.MOST_ARGUMENTS, 2**62, np.int64)
    arguments[:3] = 1, -2, out.ctypes.data
    long = numba.types.int64
    code = numba.cfunc(numba.types.void(*[long] * 5))(told)
    pass_on(code.address, 2, 7, arguments.ctypes.data)
    assert out.tolist() == [0, 0, 87, 0]
    code = numba.cfunc(numba.types.void(long, long))(told_nothing)
    pass_on(code.address, 3, out.ctypes.data, arguments.ctypes.data)
    assert out.tolist() == [0, 0, 87, 3]


def test_a_kernel_with_more_arguments_than_are_passed_is_refused() -> None:
    names = ", ".join(f"a{n}" for n in range(simd.MOST_ARGUMENTS + 1))
    with pytest.raises(TypeError, match="too_many takes 31 arguments, more than 30"):
        exec(f"def too_many(item, scratch, {names}): pass\njit.Kernel(too_many)", {"jit": jit})


@numba.njit
def count_up(counter, out):
    for i in range(len(out)):
        out[i] = simd.next_of(counter)


def test_next_of_counts() -> None:
    """test_jit.py has many threads that take from one counter."""
    counter, out = np.array([2**40, 5], np.int64), np.zeros(3, np.int64)
    count_up(counter.ctypes.data, out)
    assert out.tolist() == [2**40, 2**40 + 1, 2**40 + 2] and counter.tolist() == [2**40 + 3, 5]
