"""The compiled kernels' vector functions against numpy, through small functions compiled here."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable

import numba
import numpy as np
import pytest

from hemiola.plugins.cpu import activations, kernel, simd
from hemiola.plugins.cpu.simd import LANES

F32 = np.float32
Function = Callable[..., None]


def native(function: Function) -> Function:
    """Compiled; arrays are given by their address."""
    code = numba.njit(function)
    return lambda *values: code(*(v.ctypes.data if isinstance(v, np.ndarray) else v for v in values))


def mapped(name: str) -> Callable[..., np.ndarray]:
    """A function of one or two vectors, over arrays of any length."""
    function = getattr(activations if name in SMOOTH else simd, name)

    @native
    def one(size, a, out):
        for i in range(0, size, LANES):
            simd.store(out, i, function(simd.load(a, i)))

    @native
    def two(size, a, b, out):
        for i in range(0, size, LANES):
            simd.store(out, i, function(simd.load(a, i), simd.load(b, i)))

    def run(*arrays: np.ndarray) -> np.ndarray:
        size = len(arrays[0])
        padded = [np.pad(array, (0, -size % LANES)).astype(F32) for array in arrays]
        out = np.full(padded[0].shape, np.nan, F32)
        (one if len(arrays) == 1 else two)(len(out), *padded, out)
        return out[:size]

    return run


SMOOTH = {  # name: between, exactly, and how many units of the last place it may miss
    "exp": (-87, 88, np.exp, 2),
    "sigmoid": (-87, 200, lambda x: 1 / (1 + np.exp(-x)), 4),  # of exp, of the sum and of the quotient
    "silu": (-80, 200, lambda x: x / (1 + np.exp(-x)), 4),
    "softplus": (-87, 200, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 3),
}
RUN = {name: mapped(name) for name in SMOOTH}


def ulps(ours: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance from the exact fp64 values in units of the last place of an fp32 number."""
    return np.abs(ours.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(F32))


@pytest.mark.parametrize("name", SMOOTH)
def test_a_few_units_of_the_last_place(name: str) -> None:
    """Dense, near 0, tiny, and on both sides of where exp's power of two steps."""
    low, high, exact, bound = SMOOTH[name]
    rng = np.random.default_rng(0)
    halves = (np.arange(-125, 127) + 0.5) * np.log(2)
    parts = (
        np.linspace(low, high, 2_000_001),
        rng.standard_normal(200_000),
        10.0 ** rng.uniform(-30, 0, 100_000) * rng.choice([-1, 1], 100_000),
        *(np.nextafter(sign * halves.astype(F32), F32(side)) for side in (-100, 100) for sign in (-1, 1)),
    )
    x = np.concatenate(parts).astype(F32).clip(low, high)
    assert ulps(RUN[name](x), exact(x.astype(np.float64))).max() <= bound


FAR = np.array([0, -0.0, np.inf, -np.inf, 1e30, -1e30, 200, -200], F32)
LOG2 = float(F32(np.log(2)))


@pytest.mark.parametrize(
    "name,expected",
    [
        ("exp", [1, 1, np.inf, 0, np.inf, 0, np.inf, 0]),
        ("sigmoid", [0.5, 0.5, 1, 0, 1, 0, 1, 0]),
        ("silu", [0, 0, np.inf, np.nan, F32(1e30), 0, 200, 0]),  # -inf is NaN, as torch has it
        ("softplus", [LOG2, LOG2, np.inf, 0, F32(1e30), 0, 200, 0]),
    ],
)
def test_zeros_and_what_is_far_away(name: str, expected: list) -> None:
    np.testing.assert_array_equal(RUN[name](FAR), expected)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus"])
def test_beyond_the_range_it_goes_on_rising(name: str) -> None:
    for between in (np.linspace(-89, -87, 10_001), np.linspace(87, 89.5, 10_001)):
        y = RUN[name](between.astype(F32))
        assert (y >= 0).all() and (y[1:] >= y[:-1]).all()


def digest() -> str:
    x = np.linspace(-90, 90, 10_000).astype(F32)
    return hashlib.sha256(b"".join(run(x).tobytes() for run in RUN.values())).hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="forces features of x86 CPUs")
def test_narrow_registers_make_the_same_bits() -> None:
    """Constants come from memory there."""
    code = "from tests.plugins.test_simd import digest, simd; print(simd.CROWDED, digest())"
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | narrow, capture_output=True, check=True
    )
    assert done.stdout.decode().split() == ["True", digest()]


@pytest.mark.parametrize("name", SMOOTH)
def test_nan_stays_nan_in_its_lane(name: str) -> None:
    x = np.linspace(-3, 3, LANES).astype(F32)
    clean = RUN[name](x)
    for lane in range(LANES):
        dirty = x.copy()
        dirty[lane] = np.nan
        expected = np.where(np.arange(LANES) == lane, np.nan, clean)
        np.testing.assert_array_equal(RUN[name](dirty), expected)


def neighbours(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of neighbouring lanes, vector by vector first of a and then of b."""
    both = np.stack([a.reshape(-1, LANES), b.reshape(-1, LANES)], axis=1)
    return (both[..., 0::2] + both[..., 1::2]).reshape(-1)


@pytest.mark.parametrize(
    "name,numpys",
    [
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("largest", np.maximum),
        ("smallest", np.minimum),
        ("pairs", neighbours),
    ],
)
def test_two_vectors(name: str, numpys: Callable) -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 5 * LANES)).astype(F32)
    assert (mapped(name)(a, b) == numpys(a, b)).all()


def test_largest_and_smallest_keep_the_first_of_nan() -> None:
    a, b = np.array([1, np.nan, 1], F32), np.array([np.nan, 1, 2], F32)
    np.testing.assert_array_equal(mapped("largest")(a, b), [1, np.nan, 2])
    np.testing.assert_array_equal(mapped("smallest")(a, b), [1, np.nan, 1])


def test_floor_and_powers_of_two() -> None:
    x = np.array([-2.5, -2, -0.5, -0.0, 0.5, 126.99, -126], F32)
    assert (mapped("floor")(x) == np.floor(x)).all()
    whole, power = np.arange(-126, 128), mapped("power_of_two")
    assert (power(whole.astype(F32)) == np.ldexp(F32(1), whole)).all()
    assert power(np.array([-127, 128], F32)).tolist() == [0, np.inf]


@native
def fuse(a, b, c, out):
    simd.store(out, 0, simd.fma(simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)))
    simd.store(out, LANES, simd.add(simd.mul(simd.load(a, 0), simd.load(b, 0)), simd.load(c, 0)))


def test_fma_rounds_once_and_a_product_with_a_sum_twice() -> None:
    """LLVM may not fuse what was not asked for: bits would depend on the CPU."""
    a = (1 + np.arange(1, LANES + 1) * 2.0**-20).astype(F32)
    b = (1 - np.arange(1, LANES + 1) * 2.0**-19).astype(F32)
    c, out = -(a * b), np.empty(2 * LANES, F32)
    fuse(a, b, c, out)
    exact = a.astype(np.float64) * b + c  # 24 + 24 bits fit into 53
    assert (out[:LANES] == exact.astype(F32)).all() and exact.any()
    assert (out[LANES:] == 0).all()


@native
def fold(a, out):
    simd.put(out, 0, simd.total(simd.load(a, 0)))
    simd.put(out, 1, simd.peak(simd.load(a, 0)))
    simd.put(out, 2, simd.first(simd.load(a, 0)))
    simd.store(out, LANES, simd.splat(simd.get(a, 3)))


def test_total_peak_first_and_splat() -> None:
    rng, out = np.random.default_rng(2), np.empty(2 * LANES, F32)
    for n in range(100):
        a = rng.standard_normal(LANES).astype(F32)
        a[n % LANES] = 9  # the peak is in any lane
        fold(a, out)
        halves = a  # lanes i and i + 8, then i and i + 4, ..
        while len(halves) > 1:
            halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
        assert (out[0], out[1], out[2]) == (halves[0], 9, a[0])
        assert (out[LANES:] == a[3]).all()


@native
def sum_all(numbers, at, out):
    simd.store(out, 0, simd.sums_of(numbers, at))


def test_sums_of_sixteen_vectors() -> None:
    values, out = (
        np.random.default_rng(3).standard_normal(7 + LANES * LANES).astype(F32),
        np.empty(LANES, F32),
    )
    folded = values[7:].reshape(LANES, LANES)
    while folded.shape[1] > 1:
        folded = folded[:, 0::2] + folded[:, 1::2]
    sum_all(values, 7, out)
    assert (out == folded[:, 0]).all()


@native
def keep(a, count, other, out):
    simd.store(out, 0, simd.first_lanes(simd.load(a, 0), count, simd.load(other, 0)))


@pytest.mark.parametrize("count", [-1000, -1, 0, 1, 7, 15, 16, 17, 1000])
def test_first_lanes(count: int) -> None:
    """What is cut off may be NaN."""
    a, other, out = np.arange(LANES, dtype=F32), np.full(LANES, -np.inf, F32), np.empty(LANES, F32)
    a[max(count, 0) :] = np.nan
    keep(a, count, other, out)
    assert (out == np.where(np.arange(LANES) < count, np.arange(LANES), -np.inf)).all()


@native
def move(source, source_at, target, target_at):
    simd.store(target, target_at, simd.load(source, source_at))


@native
def move_one(source, source_at, target, target_at):
    simd.put(target, target_at, simd.get(source, source_at))


@native
def move_many(source, source_at, target, target_at):
    simd.copy(source, source_at, target, target_at, 3 * LANES)


@native
def zero(source, source_at, target, target_at):
    simd.clear(target, target_at, 2 * LANES)


@pytest.mark.parametrize(
    "function,size",
    [(move, LANES), (move_one, 1), (move_many, 3 * LANES), (zero, 2 * LANES)],
    ids=["move", "move_one", "move_many", "zero"],
)
def test_memory_is_touched_where_it_was_asked_for(function: Function, size: int) -> None:
    """At places that no register's width divides."""
    for source_at, target_at in ((0, 0), (3, 11), (21, 1)):
        source, target = np.arange(100, dtype=F32), np.full(100, -1, F32)
        expected = target.copy()
        expected[target_at : target_at + size] = (
            0 if function is zero else source[source_at : source_at + size]
        )
        function(source, source_at, target, target_at)
        assert (target == expected).all()


def test_offsets_beyond_32_bits_and_before_the_start() -> None:
    a, out, far = np.arange(64, dtype=F32), np.zeros(64, F32), 1 << 33
    move(a.ctypes.data - 4 * far, far + 5, out.ctypes.data + 4 * far, 2 - far)
    assert (out[2 : 2 + LANES] == a[5 : 5 + LANES]).all()


@native
def integers(short, long, out):
    for i in range(5):
        simd.put_long(out, i, simd.get_int(short, i))
        simd.put_int(short, i + 5, simd.get_int(short, i) - 1)
        simd.put_long(long, i + 5, simd.get_long(long, i) - 1)


def test_integers_keep_their_sign_and_wrap() -> None:
    short = np.array([0, 1, -1, 2**31 - 1, -(2**31), *[7] * 6], np.int32)
    long = np.array([0, 1, -1, 2**63 - 1, -(2**63), *[7] * 6], np.int64)
    out = np.empty(5, np.int64)
    integers(short, long, out)
    assert (out == short[:5]).all()
    assert short[5:].tolist() == [-1, 0, -2, 2**31 - 2, 2**31 - 1, 7]
    assert long[5:].tolist() == [-1, 0, -2, 2**63 - 2, 2**63 - 1, 7]


@native
def widen(halves, out):
    for i in range(LANES):
        simd.put(out, i, simd.get_half(halves, 3 + i))


def test_bfloat16_is_widened() -> None:
    """Every kind of number, NaN, infinities and subnormals too."""
    bits = np.array([0, 0x8000, 0x3F80, 0xC2F7, 0x7F80, 0xFF80, 0x7FC0, 1, 0x807F, 0x7F7F], np.uint16)
    halves, out = np.resize(bits, 3 + LANES), np.empty(LANES, F32)
    widen(halves, out)
    assert (out.view(np.uint32) == halves[3:].astype(np.uint32) << 16).all()


@native
def some(source, target, at, count, room, out):
    value = simd.load_some(source, at, count, room)
    simd.store(out, 0, value)
    simd.store_some(target, at, count, value, room)


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 100])
def test_some_lanes_are_loaded_and_stored(count: int) -> None:
    """The rest are zeros; what lies behind them is neither read nor touched."""
    source, target = np.arange(1, 41, dtype=F32), np.full(40, -1, F32)
    room, out, num = np.full(LANES, np.nan, F32), np.empty(LANES, F32), min(count, LANES)
    source[5 + num :] = np.nan
    expected = target.copy()
    expected[5 : 5 + num] = source[5 : 5 + num]
    some(source, target, 5, count, room, out)
    assert (target == expected).all()
    assert (out[:num] == source[5 : 5 + num]).all() and (out[num:] == 0).all()


@native
def number(bits, out):
    simd.put(out, 0, simd.from_bits(bits))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-5, -1.5, 0.08838834764831845, 3e38, -np.inf])
def test_a_number_passes_as_its_bits(value: float) -> None:
    out = np.empty(1, F32)
    number(kernel.bits(value), out)
    assert out.tobytes() == F32(value).tobytes()


def told(item, scratch, a, b, out):
    simd.put_long(out, item, 100 * a + 10 * b + scratch)


def told_nothing(item, scratch):
    simd.put_long(scratch, item, item)


@native
def pass_on(function, item, scratch, arguments):
    simd.invoke(function, item, scratch, arguments)


def test_a_function_gets_its_arguments_and_no_others() -> None:
    """The caller always passes MOST_ARGUMENTS."""
    out, arguments = np.zeros(4, np.int64), np.full(simd.MOST_ARGUMENTS, 2**62, np.int64)
    arguments[:3] = 1, -2, out.ctypes.data
    long = numba.types.int64
    pass_on(numba.cfunc(numba.types.void(*[long] * 5))(told).address, 2, 7, arguments)
    assert out.tolist() == [0, 0, 87, 0]
    pass_on(numba.cfunc(numba.types.void(long, long))(told_nothing).address, 3, out, arguments)
    assert out.tolist() == [0, 0, 87, 3]
