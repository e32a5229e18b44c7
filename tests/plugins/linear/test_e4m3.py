"""Inputs and weights in e4m3 on CUDA: the reference but for sums of 128 products, and rows that are alone.

Under the interpreter a sum's order is numpy's, in fp32: LIMIT is what 128 additions can err by. On a GPU the
tensor cores keep some 14 bits of a sum.
"""

import itertools

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.lines import pack_lines, sections
from hemiola.plugins.gpu.tiles import table_of
from hemiola.plugins.groups import Layout
from hemiola.plugins.inputs import SPAN, product, rounded
from hemiola.plugins.linear.e4m3 import MANY, TILES, _round, block_of, buffers, linear
from tests.gpu.laws import (
    DEVICE,
    HALF,
    INTERPRETED,
    apart,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
    same_bits,
)
from tests.plugins.linear.test_narrow_inputs import lines, make

pytestmark = on_gpu

LIMIT = 2e-6 if INTERPRETED else 5e-3
OURS = [*(tile for _, tile in TILES), MANY]
EVERY = OURS if INTERPRETED else OURS + [many.tile for many in table_of(90).steps]
LAYOUTS = [
    Layout("e4m3", span, (), by)
    for by, span in itertools.product(("group", "token", "static"), (0, SPAN, 2 * SPAN))
]
EACH = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
EACH_INPUTS = pytest.mark.parametrize("layout", LAYOUTS[1::3], ids=str)
NONE = torch.empty(0, device=DEVICE)


@EACH_INPUTS
@pytest.mark.parametrize("num_inputs", [48, 528])
def test_inputs_are_rounded_as_the_reference_says(num_inputs: int, layout: Layout) -> None:
    x, group = lines(num_inputs).to(DEVICE), make(layout, 40, num_inputs)
    wanted, scales = rounded(x.cpu(), layout, torch.tensor(0.013))
    cut = sections(pack_lines(group).to(DEVICE), layout, 40, num_inputs)
    codes, by = buffers(x, len(x), cut, layout)
    given = apart(x)
    _round[(len(x),)](
        given, cut.static, codes, by, num_inputs, cut.width, by.stride(0), given.stride(0), BY=layout.inputs,
        BLOCK=block_of(cut), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    usual = [n for n in range(len(x)) if n not in (4, 5, 6)]  # a scale that is no number says the rest
    by = by.t().cpu()
    assert torch.equal(by[usual], scales[usual])
    assert torch.equal(codes.cpu().float()[usual, :num_inputs], wanted[usual])
    assert layout.inputs == "static" or bool(by[[4, 5, 6]].isnan().any(1).all())
    assert not codes[usual, num_inputs:].float().any()


@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", [(40, 96), (100, 528)])
def test_against_the_reference(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    group = make(layout, num_outputs, num_inputs)
    weight, bias = pack_lines(group).to(DEVICE), torch.randn(num_outputs, device=DEVICE)
    for num_tokens in (1, 17):
        x = torch.randn(num_tokens, num_inputs, device=DEVICE)
        with poisoned():
            y = linear(apart(x), weight, bias, num_outputs, layout)
        wanted = product(x.cpu(), group) + bias.cpu()
        assert rel_error(y.cpu(), wanted) < LIMIT and y.is_contiguous()


@pytest.mark.parametrize("activation", ["", "relu2", "swiglu"])
@pytest.mark.parametrize("tile", EVERY, ids=str)
def test_every_tile_against_the_reference(activation: str, tile) -> None:
    layout, halved = LAYOUTS[1], 2 if activation == "swiglu" else 1
    group = make(layout, 80, 176)
    x, residual = randn(9, 176, dtype=torch.float32), randn(9, 80 // halved, dtype=torch.float32)
    y = linear(x, pack_lines(group).to(DEVICE), NONE, 80, layout, apart(residual), activation, tile)
    wanted = product(x.cpu(), group)
    if activation == "relu2":
        wanted = wanted.relu().square()
    if activation == "swiglu":
        gate, value = wanted.unflatten(1, (-1, 2, 8)).unbind(2)
        wanted = (torch.nn.functional.silu(gate) * value).flatten(1)
    assert rel_error(y.cpu(), wanted + residual.cpu()) < 4 * LIMIT


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", [(4096, 4096), (1056, 1096), (384, 12288)])
def test_every_tile_has_the_same_bits(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    """Before they are rounded: a sum, and the sum less what it rounds to."""
    weight, x = pack_lines(make(layout, num_outputs, num_inputs)).to(DEVICE), randn(300, num_inputs)
    wanted = linear(x, weight, NONE, num_outputs, layout, tile=EVERY[0])
    rest = linear(x, weight, NONE, num_outputs, layout, -wanted, tile=EVERY[0])
    assert rest.any()
    for tile in EVERY[1:]:
        assert same_bits(linear(x, weight, NONE, num_outputs, layout, tile=tile), wanted), tile
        assert same_bits(linear(x, weight, NONE, num_outputs, layout, -wanted, tile=tile), rest), tile


@EACH_INPUTS
def test_a_row_is_alone(layout: Layout) -> None:
    weight = pack_lines(make(layout, 96, 176)).to(DEVICE)
    rows_are_alone(lambda x: linear(x, weight, NONE, 96, layout), randn(20, 176))


def test_best_is_the_first_highest_of_the_stored_outputs() -> None:
    layout, bias = LAYOUTS[0], randn(130)
    x, weight = randn(5, 96), pack_lines(make(layout, 130, 96)).to(DEVICE)
    lines_ = linear(x, weight, bias, 130, layout).tolist()
    value, output = linear(x, weight, bias, 130, layout, ending="argmax")
    assert output.tolist() == [line.index(max(line)) for line in lines_]
    assert value.tolist() == [max(line) for line in lines_] and x.dtype is HALF


def test_a_weight_of_another_layout_is_refused() -> None:
    packed = pack_lines(make(LAYOUTS[1], 64, 256)).to(DEVICE)
    with pytest.raises(
        ValueError, match="is not packed from 64 outputs of 256 inputs in e4m3 row x e4m3 by static"
    ):
        linear(torch.zeros(2, 256, device=DEVICE), packed, NONE, 64, Layout("e4m3", 0, (), "static"))
