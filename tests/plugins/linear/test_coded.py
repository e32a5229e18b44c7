"""The dense layer on CUDA with quantised weights: against fp64, and the same bits in every tile."""

import itertools
from functools import partial

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.tiles import Tile, coded_tile_of, coded_tiles, table_of
from hemiola.plugins.gpu.words import form_of, num_bytes, pack_words, random_words, sections
from hemiola.plugins.groups import Layout, WeightGroup, dequantised, numbers
from hemiola.plugins.linear import cuda
from hemiola.plugins.linear.coded import WIDE, linear, unpacked
from tests.gpu.laws import (
    DEVICE,
    HALF,
    INTERPRETED,
    LENGTHS,
    apart,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
    same_bits,
)
from tests.plugins.linear.test_codes import make

pytestmark = on_gpu

LAYOUTS = [
    Layout("e4m3", 128), Layout("e4m3", 0), Layout("e4m3", 48), Layout("e2m1", 16, ("factor",)),
    Layout("e2m1", 16, ("divisor",)), Layout("int8", 0), Layout("int8", 32, ("zeros",)), Layout("int4", 32),
    Layout("int8", 0, ("zeros",)), Layout("int4", 128), Layout("int4", 64, ("zeros",)), Layout("int4", 0),
    Layout("int4", 256), Layout("int8", 128), Layout("int4", 16), Layout("int4", 32, ("zeros",)),
]  # fmt: skip
EACH = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
SHAPES = [(72, 300), (40, 96)] if INTERPRETED else [(4096, 4096), (2688, 1856), (257, 2048), (100, 72)]
ODD_TILES = (
    Tile(64, 16, 64, 4, 2, True),
    Tile(32, 32, 512, 2, 3, True),
    Tile(16, 16, 128, 1, 2, True),
    Tile(32, 16, 64, 2, 2, True, abreast=2),
)
ALL_TILES = {few.tile for capability in (0, 90) for few in table_of(capability).codes} | set(ODD_TILES)
if not INTERPRETED:
    ALL_TILES |= {many.tile for many in table_of(90).codes_many}
else:
    ALL_TILES = {tile for tile in ALL_TILES if not tile.direct}  # Gluon's
TILES = sorted(ALL_TILES)[:: 4 if INTERPRETED else 1]
NONE = torch.empty(0, dtype=HALF, device=DEVICE)
BITS = pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")


class Weight:
    """A quantised weight, packed, and its numbers."""

    def __init__(self, layout: Layout, *shape: int) -> None:
        group = make(layout, *shape).map(lambda tensor: tensor.to(DEVICE))
        self.layout, self.num_outputs = layout, shape[-2]
        self.packed, self.numbers = pack_words(group), dequantised(group)

    @property
    def rest(self) -> tuple[int, Layout]:
        return self.num_outputs, self.layout


def truth(x, weight: Weight, bias=None, residual=None, activation: str = "") -> torch.Tensor:
    y = x.double() @ weight.numbers.double().t()
    y = y if bias is None else y + bias.double()
    if activation == "relu2":
        y = y.relu().square()
    if activation == "swiglu":
        gate, value = y.unflatten(1, (-1, 2, 8)).unbind(2)
        y = (torch.nn.functional.silu(gate) * value).flatten(1)
    return y if residual is None else y + residual.double()


def inputs(num_tokens: int, num_inputs: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Small enough for fp16, which the interpreter multiplies."""
    return (randn(num_tokens, num_inputs, dtype=torch.float32) * 2.0**-8).to(dtype)


@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
def test_against_fp64(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    weight, bias = Weight(layout, num_outputs, num_inputs), randn(num_outputs)
    for num_tokens in LENGTHS[-2:]:
        x = inputs(num_tokens, num_inputs)
        with poisoned():
            y, plain = (
                linear(apart(x), weight.packed, bias, *weight.rest),
                linear(x, weight.packed, NONE, *weight.rest),
            )
        assert rel_error(y, truth(x, weight, bias)) < 4e-3 and y.is_contiguous()
        assert rel_error(plain, truth(x, weight)) < 4e-3


@pytest.mark.parametrize("activation", ["", "relu2", "swiglu"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_against_fp64(tile: Tile, activation: str) -> None:
    for layout in LAYOUTS[:: 5 if INTERPRETED else 1]:
        weight = Weight(layout, *((80, 176) if INTERPRETED else (1056, 1096)))
        x, bias = inputs(9 if INTERPRETED else 333, weight.numbers.shape[1]), randn(weight.num_outputs)
        residual = randn(len(x), weight.num_outputs // (2 if activation == "swiglu" else 1))
        with poisoned():
            y = linear(apart(x), weight.packed, bias, *weight.rest, apart(residual), activation, tile)
        assert rel_error(y, truth(x, weight, bias, residual, activation)) < 4e-3, layout


@BITS
@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", [(4096, 4096), (1056, 1096), (384, 12288)])
def test_every_tile_has_the_same_bits(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    """Before they are rounded: a sum, and the sum less what it rounds to."""
    weight, x = Weight(layout, num_outputs, num_inputs), inputs(300, num_inputs)

    def run(tile: Tile, residual: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight.packed, NONE, *weight.rest, residual, tile=tile)

    wanted = run(TILES[0], None)
    rest = run(TILES[0], -wanted)
    assert rest.any()
    for tile in TILES:
        assert same_bits(run(tile, None), wanted) and same_bits(run(tile, -wanted), rest), tile


@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", [(72, 300), (40, 96)])
def test_what_is_widened_into_memory_is_what_is_multiplied(
    num_outputs: int, num_inputs: int, layout: Layout
) -> None:
    group = make(layout, num_outputs, num_inputs).map(lambda tensor: tensor.to(DEVICE))
    span, wanted = layout.span or num_inputs, numbers(group)
    if "zeros" in layout.others:
        wanted -= group.tensors["zeros"].float().repeat_interleave(span, 1)[:, :num_inputs]
    if layout.kind == "e2m1":  # 2^-16 of it on a GPU, where a row's sum makes up for that
        scales = group.tensors["scales"].float() * (1.0 if INTERPRETED else 2.0**-16)
        wanted *= scales.repeat_interleave(span, 1)[:, :num_inputs]
    with poisoned():
        packed = sections(pack_words(group), layout, num_outputs, num_inputs)
        found = unpacked(packed, num_outputs, num_inputs)
    assert torch.equal(found[:, :num_inputs].float(), wanted) and bool(found.isfinite().all())


@BITS
@EACH
def test_a_row_is_alone(layout: Layout) -> None:
    weight, x = Weight(layout, 1056, 1096), inputs(2200, 1096)
    rows_are_alone(lambda x: linear(x, weight.packed, NONE, *weight.rest), x)


@EACH
def test_fp32_is_the_layer_of_the_same_numbers(layout: Layout) -> None:
    """On a GPU to the last bit: a weight is the fp32 number that it stands for."""
    weight = Weight(layout, 70, 200)
    x, none = inputs(20, 200, torch.float32), torch.empty(0, device=DEVICE)
    found = linear(x, weight.packed, none, *weight.rest)
    wanted = cuda.linear(x, weight.numbers, none)
    assert rel_error(found, wanted) < 1e-6 if INTERPRETED else torch.equal(found, wanted)


@EACH
def test_best_is_the_first_highest_of_the_stored_outputs(layout: Layout) -> None:
    sizes = ((130, 5, True), (130, 5, False), (144, 5, False), (144, 40, True))
    for num_outputs, num_tokens, has_bias in sizes[: 2 if INTERPRETED else 4]:
        weight = Weight(layout, num_outputs, 96)
        x, given = inputs(num_tokens, 96), randn(num_outputs) if has_bias else NONE
        with poisoned():
            lines = linear(x, weight.packed, given, *weight.rest).tolist()
            value, output = linear(x, weight.packed, given, *weight.rest, ending="argmax")
        assert output.tolist() == [line.index(max(line)) for line in lines]
        assert value.tolist() == [max(line) for line in lines]


@EACH
def test_it_takes_as_many_bytes_as_its_codes_and_scales(layout: Layout) -> None:
    num_outputs, num_inputs = 1024, 4096
    bits = 8 if layout.kind in ("e4m3", "int8") else 4
    each = {"e2m1": 8 / 16}.get(layout.kind, 32 / layout.span if layout.span not in (0, 48, 256) else 0)
    each = {48: 2.0, 256: 0.25}.get(layout.span, each)
    if "zeros" in layout.others and layout.span:
        each += 16 / layout.span
    rows = 48 * num_outputs if layout.kind == "e2m1" or not layout.span else 0
    most = num_outputs * num_inputs * (bits + each) + rows
    found = 8 * num_bytes(form_of(layout), num_outputs, num_inputs)
    assert num_outputs * num_inputs * (bits + each) <= found <= most


@EACH
def test_its_shape_is_known_without_memory(layout: Layout) -> None:
    empty = pack_words(WeightGroup.empty(layout, (3, 50, 80)))
    full = pack_words(make(layout, 3, 50, 80))
    assert (empty.shape, empty.dtype) == (full.shape, full.dtype) and empty.is_meta
    alone = [pack_words(make(layout, 3, 50, 80).map(lambda tensor, n=n: tensor[n])) for n in range(3)]
    assert torch.equal(full, torch.stack(alone))


@EACH
def test_random_words_have_numbers_of_the_size_that_was_asked_for(layout: Layout) -> None:
    made = random_words(layout, (96, 256), 0.25, torch.Generator(DEVICE).manual_seed(1))
    assert made.shape == pack_words(WeightGroup.empty(layout, (96, 256))).shape
    y = linear(inputs(64, 256), made, NONE, 96, layout).float()
    assert abs(y.std() / (2.0**-8 * 0.25 * 16) - 1) < 0.1


def test_a_weight_of_another_layout_or_shape_is_refused() -> None:
    weight = Weight(LAYOUTS[0], 64, 256)
    for shape, layout in (((64, 512), LAYOUTS[0]), ((65, 256), LAYOUTS[0]), ((64, 256), Layout("int4", 128))):
        with pytest.raises(ValueError, match=f"is not packed from {shape[0]} outputs of {shape[1]}"):
            sections(weight.packed, layout, *shape)


def test_all_tiles_are_among_those_compiled() -> None:
    for gpu in (cuda.gpu_of(torch.device("meta")), cuda.gpu_of(torch.device("meta"))._replace(capability=80)):
        for num_outputs in (16, 4096, 248320):
            ways = itertools.product((1, 8, 17, 64, 511, 512, 8192), (4, 8), (False, True), (False, True))
            for num_tokens, bits, in_gluon, has_one_step in ways:
                may = partial(may_be, in_gluon=in_gluon, has_one_step=has_one_step)
                tile = coded_tile_of(num_tokens, num_outputs, bits, gpu, may)
                assert tile in coded_tiles(num_outputs, gpu, in_gluon) and may(tile)
    assert WIDE.weight_first


def may_be(tile: Tile, in_gluon: bool, has_one_step: bool) -> bool:
    """As coded.py has it: steps of a block are for tiles that are not direct."""
    return in_gluon and (has_one_step or not tile.direct) if tile.direct or tile.consumers else True
