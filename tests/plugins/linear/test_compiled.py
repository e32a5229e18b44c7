"""The compiled dense layer: every output is one chain of fused multiply-adds, on any CPU, in any company."""

import os
import subprocess
import sys

import pytest
import torch

from hemiola.plugins.cpu import kernel
from hemiola.plugins.cpu.tiles import STRIP
from hemiola.plugins.linear.compiled import BLOCK, linear, pack
from tests.plugins.linear.chains import NUM_TOKENS, SIZES, chain, digest, make

NONE = torch.empty(0)
MANY = 2 * BLOCK + 7
DTYPE = pytest.mark.parametrize("halves", [False, True], ids=["fp32", "bf16"])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


@DTYPE
@pytest.mark.parametrize("num_outputs", [1, STRIP, STRIP + 1, 100])
def test_pack_cuts_outputs_into_strips_and_pads_with_zeros(num_outputs: int, halves: bool) -> None:
    _, weight, _ = make(1, num_outputs, 24, halves)
    strips = pack(weight)
    assert strips.shape == (-(-num_outputs // STRIP), 24, STRIP)
    assert strips.dtype is (torch.bfloat16 if halves else torch.float32)
    if halves:  # outputs j and j + 16 of a strip lie side by side
        strips = strips.unflatten(-1, (STRIP // 2, 2)).mT.flatten(-2)
    columns = strips.mT.flatten(0, 1).float()
    assert same_bits(columns[:num_outputs], weight.float())
    assert (columns[num_outputs:] == 0).all()


def test_pack_takes_experts_one_by_one() -> None:
    weights = torch.stack([make(1, 50, 24, True, seed)[1] for seed in range(3)])
    strips = pack(weights)
    assert strips.shape == (3, 2, 24, STRIP)
    assert all(torch.equal(strips[n], pack(weights[n])) for n in range(3))


@DTYPE
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("num_outputs, num_inputs", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_every_output_is_one_chain(num_outputs: int, num_inputs: int, biased: bool, halves: bool) -> None:
    x, weight, bias = make(max(NUM_TOKENS), num_outputs, num_inputs, halves)
    expected, packed = chain(x, weight, bias if biased else None), pack(weight)
    for num_tokens in NUM_TOKENS:
        y = linear(x[:num_tokens], packed, bias if biased else NONE, num_outputs)
        assert same_bits(y, expected[:num_tokens]), f"{num_tokens} tokens"


@DTYPE
def test_a_chain_that_ends_in_minus_zero_does(halves: bool) -> None:
    x, weight = torch.full((3, 1), -1e-30), torch.full((40, 1), 2.0**-100)
    y = linear(x, pack(weight.bfloat16() if halves else weight), NONE, 40)
    assert (y == 0).all() and y.signbit().all()


def test_no_tokens() -> None:
    _, weight, bias = make(0, 100, 16, True)
    assert linear(torch.empty(0, 16), pack(weight), bias, 100).shape == (0, 100)


@DTYPE
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_outputs, num_inputs", [(100, 300), (777, 256), (1288, 16)])
@pytest.mark.usefixtures("poisoned_empty")
def test_row_bits_depend_on_the_row_alone(
    num_outputs: int, num_inputs: int, num_threads: int, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = make(MANY, num_outputs, num_inputs, halves)
    packed = pack(weight)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, packed, bias, num_outputs)

    alone = torch.cat([run(row) for row in x.split(1)])
    monkeypatch.setattr(kernel, "WORTH_A_THREAD", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_tokens in (*NUM_TOKENS, 72, BLOCK, BLOCK + 1, MANY):
            for start in {0, min(5, MANY - num_tokens), MANY - num_tokens}:
                part = slice(start, start + num_tokens)
                assert same_bits(run(x[part]), alone[part]), f"{num_tokens} tokens from {start} on"
        order = torch.randperm(MANY, generator=torch.Generator().manual_seed(1))
        assert same_bits(run(x[order]), alone[order]), "shuffled"
    finally:
        torch.set_num_threads(before)


@DTYPE
def test_nan_stays_in_its_row(halves: bool) -> None:
    x, weight, bias = make(25, 100, 300, halves)
    packed = pack(weight)
    for num_tokens in (2, 3, 8, 12, 25):
        clean = linear(x[:num_tokens], packed, bias, 100)
        for row in {0, 1, num_tokens // 2, num_tokens - 1}:
            dirty = x[:num_tokens].clone()
            dirty[row] = torch.nan
            y = linear(dirty, packed, bias, 100)
            others = [t for t in range(num_tokens) if t != row]
            assert y[row].isnan().all() and same_bits(y[others], clean[others])


@DTYPE
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 13, BLOCK + 1])
def test_columns_of_a_wider_tensor_are_the_tensor(num_tokens: int, halves: bool) -> None:
    x, weight, bias = make(num_tokens, 100, 250, halves)
    packed, edge = pack(weight), torch.full((num_tokens, 3), torch.nan)
    columns = torch.cat([edge, x, edge], dim=1)[:, 3:-3]
    expected = linear(x, packed, bias, 100)
    assert same_bits(linear(columns, packed, bias, 100), expected)
    assert same_bits(linear(x.mT.contiguous().mT, packed, bias, 100), expected)


@pytest.mark.parametrize("num_outputs, num_inputs", [(100, 23), (96, 24), (129, 24)])
def test_a_weight_of_other_sizes_is_refused(num_outputs: int, num_inputs: int) -> None:
    _, weight, _ = make(1, 100, 24, True)
    with pytest.raises(ValueError, match="is not packed from"):
        linear(torch.zeros(2, num_inputs), pack(weight), NONE, num_outputs)


def test_narrow_registers_make_the_same_bits() -> None:
    """All sizes, in a process whose kernels are compiled for AVX2: other tiles, other instructions."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("not an x86 CPU with AVX2")
    code = (
        "from hemiola.plugins.cpu.registers import REGISTERS; from tests.plugins.linear.chains import digest;"
        "print(REGISTERS.lanes, digest())"
    )
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | narrow | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-2:] == ["8", digest()]
