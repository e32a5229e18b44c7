"""Numbers of 8 bits against torch's cast, bit for bit."""

import numba
import pytest
import torch

from hemiola.plugins.cpu import simd
from hemiola.plugins.cpu.e4m3 import load_e4m3, nearest_e4m3, store_e4m3
from hemiola.plugins.spec import E4M3

CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(E4M3).float()


@numba.njit
def _widen(size, source, target):
    for i in range(0, size, simd.LANES):
        simd.store(target, i, load_e4m3(source, i))


@numba.njit
def _round(size, source, target):
    for i in range(0, size, simd.LANES):
        store_e4m3(target, i, simd.load(source, i))


@numba.njit
def _nearest(size, source, target):
    for i in range(0, size, simd.LANES):
        simd.store(target, i, nearest_e4m3(simd.load(source, i)))


def rounded(x: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([x, x.new_zeros(-len(x) % simd.LANES)])
    codes = torch.empty(len(padded), dtype=torch.uint8)
    _round(len(padded), padded.data_ptr(), codes.data_ptr())
    numbers = torch.empty(len(padded))
    _nearest(len(padded), padded.data_ptr(), numbers.data_ptr())
    assert torch.equal(numbers.view(torch.int32), codes.view(E4M3).float().view(torch.int32))
    return codes[: len(x)]


def test_every_code_is_its_number() -> None:
    found = torch.empty(256)
    _widen(256, CODES.data_ptr(), found.data_ptr())
    assert torch.equal(found.view(torch.int32), NUMBERS.view(torch.int32))


def halves() -> torch.Tensor:
    """What lies in the middle between two neighbours, and the fp32 numbers beside it; both signs."""
    numbers = NUMBERS[:127]
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([middle, middle.nextafter(numbers[1:]), middle.nextafter(numbers[:-1])])
    return torch.cat([near, -near])


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float(),
        halves(),
        torch.arange(0, 2**31 - 1, 2003, dtype=torch.int32).view(torch.float32),
        torch.tensor([448, 449, 464, 465, 480, 1e30, torch.inf, 2.0**-10, 1.5 * 2.0**-10, 1e-40]),
    ],
    ids=["all of bf16", "halves", "fp32", "ends"],
)
def test_it_is_torchs_cast_behind_a_clamp(x: torch.Tensor) -> None:
    """NaN, infinities, ties and subnormals of both formats among them."""
    for sign in (1, -1):
        wanted = (sign * x).clamp(-448, 448).to(E4M3).view(torch.uint8)
        assert torch.equal(rounded(sign * x), wanted)
