"""The compiled dense layer against float64; a row's bits against the same row alone."""

import pytest
import torch
from kit.grid import rel_error, same_bits

from hemiola.plugins import jit

pytest.importorskip("numba")

from hemiola.plugins.linear.compiled import MANY, STRIP, pack, product

LENGTHS = (*range(1, 10), 15, 16, 17, 72, 256, 257)
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
OUTPUTS = (64, 100, 776, 1288, 4096)
INPUTS = (16, 256, 500)
BIASED = pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])


def make(num_tokens: int, num_inputs: int, num_outputs: int, biased: bool, seed: int = 0) -> tuple:
    """x, a weight [F, O] that bfloat16 holds, a bias or None."""
    print("seed", seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_inputs, generator=rng)
    weight = torch.randn(num_inputs, num_outputs, generator=rng).bfloat16().float()
    return x, weight, torch.randn(num_outputs, generator=rng) if biased else None


def packed(weight: torch.Tensor) -> torch.Tensor:
    strips = pack(weight)
    assert strips is not None
    return strips


@pytest.mark.parametrize("num_outputs", [1, STRIP, STRIP + 1, 100])
def test_pack_cuts_columns_into_strips_and_pads_with_zeros(num_outputs: int) -> None:
    _, weight, _ = make(1, 24, num_outputs, False)
    strips = packed(weight)
    assert strips.shape == (-(-num_outputs // STRIP), 24, STRIP) and strips.dtype is torch.bfloat16
    columns = strips.transpose(0, 1).reshape(24, -1).float()
    assert same_bits(columns[:, :num_outputs], weight)
    assert (columns[:, num_outputs:] == 0).all()
    assert same_bits(packed(weight.mT.contiguous().mT), strips)


def test_pack_keeps_no_weight_that_bfloat16_would_change() -> None:
    _, weight, _ = make(1, 24, 100, False)
    assert pack(weight) is not None
    for value in (1 + 2**-8, 1e-41, 3.4e38, torch.nan):
        changed = weight.clone()
        changed[-1, -1] = value
        assert pack(changed) is None, value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_pack_keeps_nothing_but_fp32(dtype: torch.dtype) -> None:
    assert pack(torch.ones(64, 64, dtype=dtype)) is None


@EXACT
@BIASED
@pytest.mark.parametrize("num_inputs", INPUTS)
@pytest.mark.parametrize("num_outputs", OUTPUTS)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_float64(num_outputs: int, num_inputs: int, biased: bool, exact: bool) -> None:
    x, weight, bias = make(max(LENGTHS), num_inputs, num_outputs, biased)
    expected = x.double() @ weight.double() + (0 if bias is None else bias.double())
    strips = packed(weight)
    for num_tokens in LENGTHS:
        y = product(x[:num_tokens], strips, bias, num_outputs, exact)
        assert y.shape == (num_tokens, num_outputs) and y.dtype is torch.float32
        assert not y.isnan().any(), f"{num_tokens} tokens"
        assert rel_error(y, expected[:num_tokens]) < 1e-6, f"{num_tokens} tokens"


@EXACT
def test_no_tokens(exact: bool) -> None:
    x, weight, bias = make(0, 16, 100, True)
    assert product(x, packed(weight), bias, 100, exact).shape == (0, 100)


@BIASED
@pytest.mark.parametrize("num_outputs,num_inputs", [(100, 500), (776, 256), (1288, 16)])
@pytest.mark.parametrize("most,exact", [(MANY, False), (300, True)], ids=["fast", "exact"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_row_bits_do_not_depend_on_neighbours_or_threads(
    num_outputs: int,
    num_inputs: int,
    biased: bool,
    most: int,
    exact: bool,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias = make(most, num_inputs, num_outputs, biased)
    strips = packed(weight)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return product(rows, strips, bias, num_outputs, exact)

    alone = torch.cat([run(row) for row in x.split(1)])
    monkeypatch.setattr(jit, "WORTH_A_THREAD", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_tokens in (n for n in (*LENGTHS, most) if n <= most):
            for start in {0, min(5, most - num_tokens), most - num_tokens}:
                part = slice(start, start + num_tokens)
                assert same_bits(run(x[part]), alone[part]), f"{num_tokens} tokens from {start} on"
        shuffled = torch.randperm(most, generator=torch.Generator().manual_seed(1))
        assert same_bits(run(x[shuffled]), alone[shuffled]), "shuffled"
    finally:
        torch.set_num_threads(before)


def test_exact_and_fast_differ_only_in_who_multiplies_many_tokens() -> None:
    x, weight, bias = make(MANY + 1, 500, 100, True)
    strips = packed(weight)
    for num_tokens in (1, 16, MANY):
        fast = product(x[:num_tokens], strips, bias, 100, False)
        assert same_bits(fast, product(x[:num_tokens], strips, bias, 100, True))
    assert bias is not None
    assert same_bits(product(x, strips, bias, 100, False), torch.addmm(bias, x, weight))
    assert same_bits(product(x, strips, None, 100, False), torch.mm(x, weight))


def test_nan_stays_in_its_row() -> None:
    x, weight, bias = make(18, 256, 100, True)
    strips = packed(weight)
    clean = product(x, strips, bias, 100, False)
    for row in (0, 3, 15, 16, 17):
        dirty = x.clone()
        dirty[row] = torch.nan
        y = product(dirty, strips, bias, 100, False)
        assert y[row].isnan().all()
        others = [t for t in range(18) if t != row]
        assert same_bits(y[others], clean[others])


@EXACT
@BIASED
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 17, 257])
def test_columns_of_a_wider_tensor_are_the_tensor(num_tokens: int, biased: bool, exact: bool) -> None:
    x, weight, bias = make(num_tokens, 256, 100, biased)
    strips = packed(weight)
    edge = torch.full((num_tokens, 3), torch.nan)
    columns = torch.cat([edge, x, edge], dim=1)[:, 3:-3]
    expected = product(x, strips, bias, 100, exact)
    assert same_bits(product(columns, strips, bias, 100, exact), expected)
    assert same_bits(product(x.mT.contiguous().mT, strips, bias, 100, exact), expected)
