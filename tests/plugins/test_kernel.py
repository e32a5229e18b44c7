"""What kernels are given, and how threads share them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest
import torch

from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import MOST_ARGUMENTS, f32, get, get_long, put, put_long


def count(item, scratch, counts, step):
    """counts[item] += step"""
    put(counts, item, get(counts, item) + f32(step))


def keep(item, scratch, size, places, kept):
    """Fill the scratch memory, be slow, and see whether it is still there."""
    put_long(places, item, scratch)
    for i in range(0, size, 8):
        put_long(scratch, i // 8, item)
    for _ in range(20):
        for i in range(0, size, 8):
            if get_long(scratch, i // 8) != item:
                put_long(kept, item, 0)


def show(item, scratch, a, b, c, d, out):
    """What arrives: two numbers, the bits of an fp32 number, and the first number of a tensor."""
    put_long(out, 0, a)
    put_long(out, 1, b)
    put_long(out, 2, c)
    put_long(out, 3, get_long(d, 0))


Own = Callable[[Callable], Kernel]


def test_every_item_runs_exactly_once(own: Own, threads: int) -> None:
    counter, counts, guard = own(count), torch.zeros(200_001), 16
    expected = counts.clone()
    for num_items in (0, 1, 2, threads, 1000, len(counts) - guard):
        for nanoseconds in (0.0, 1e9):
            counter(num_items, nanoseconds, counts, 3)
            expected[:num_items] += 3
    assert torch.equal(counts, expected)


def test_a_kernel_with_more_arguments_than_are_passed_is_refused(own: Own) -> None:
    names = ", ".join(f"a{n}" for n in range(MOST_ARGUMENTS + 1))
    with pytest.raises(TypeError, match="takes 31 arguments, more than 30"):
        own(eval(f"lambda item, scratch, {names}: None"))


def test_the_number_of_arguments_is_checked_by_name(own: Own) -> None:
    counter, counts = own(count), torch.zeros(10)
    for wrong in ((), (counts,), (counts, 1, 2)):
        message = rf"^count takes 2 arguments \(counts, step\), not {len(wrong)}$"
        with pytest.raises(TypeError, match=message):
            counter(10, 0.0, *wrong)
    assert (counts == 0).all()


@pytest.mark.parametrize(
    "values",
    [
        (1, -1, 1.5, torch.tensor([7])),
        (True, False, -0.0, torch.tensor([2**62, 1])),
        (np.int64(2**40), np.int32(-3), float("inf"), torch.tensor([5, 6])[1:]),
        (2**63 - 1, -(2**63), 1e-5, torch.tensor([-1])),
    ],
    ids=str,
)
def test_what_a_kernel_gets(own: Own, values: tuple) -> None:
    """Numbers of any integer type, the bits of an fp32 number, and a tensor from its own first number on."""
    out = torch.zeros(4, dtype=torch.int64)
    own(show)(1, 0.0, *values, out)
    bits = np.float32(values[2]).view(np.uint32)
    assert out.tolist() == [int(values[0]), int(values[1]), int(bits), values[3][0]]


@pytest.mark.parametrize("value", [np.float32(1), None, "1", [1]], ids=repr)
def test_what_no_kernel_takes_is_refused(own: Own, value: object) -> None:
    with pytest.raises(TypeError):
        own(count)(1, 0.0, torch.zeros(1), value)


@pytest.mark.parametrize("size", [8, 72, 4096, 200_000])
def test_scratch_is_a_threads_own(own: Own, size: int, threads: int) -> None:
    num_items = max(8, 2_000_000 // size) if size > 1000 else 4000
    places, kept = torch.zeros(num_items, dtype=torch.int64), torch.ones(num_items, dtype=torch.int64)
    own(keep)(num_items, 1e9, size, places, kept, scratch=size)
    assert kept.all()
    used = sorted(set(places.tolist()))
    assert len(used) <= threads and all(place % 64 == 0 for place in used)
    assert all(b - a >= size for a, b in pairwise(used))


def test_scratch_is_kept_for_the_next_call(own: Own) -> None:
    keeper, places, kept = own(keep), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    keeper(1, 0.0, 1 << 20, places, kept, scratch=1 << 20)
    place = places.item()
    keeper(1, 0.0, 64, places, kept, scratch=64)
    assert places.item() == place and kept.all()


def test_two_python_threads_do_not_share_scratch(own: Own) -> None:
    keeper, size, num_items = own(keep), 4096, 64
    keeper.compile()
    both = Barrier(2)  # else one might do the other's work, too

    def call(_: int) -> set[int]:
        both.wait(60)
        used: set[int] = set()
        for _ in range(50):
            places, kept = torch.zeros(num_items).long(), torch.ones(num_items).long()
            keeper(num_items, 1e9, size, places, kept, scratch=size)
            assert kept.all()
            used |= set(places.tolist())
        return used

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(call, range(2))
    assert not one & other
