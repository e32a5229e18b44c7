"""The compiled dense layer: every output is one chain of fused multiply-adds, on any CPU, in any company."""

import pytest
import torch
from kit.ops import same_bits

from hemiola.plugins.cpu.tiles import STRIP
from hemiola.plugins.linear.compiled import linear, pack
from tests.plugins.linear.chains import NUM_TOKENS, SIZES, chain, make

NONE = torch.empty(0)
DTYPE = pytest.mark.parametrize("halves", [False, True], ids=["fp32", "bf16"])


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


@pytest.mark.parametrize("num_outputs, num_inputs", [(100, 23), (96, 24), (129, 24)])
def test_a_weight_of_other_sizes_is_refused(num_outputs: int, num_inputs: int) -> None:
    _, weight, _ = make(1, 100, 24, True)
    with pytest.raises(ValueError, match="is not packed from"):
        linear(torch.zeros(2, num_inputs), pack(weight), NONE, num_outputs)
