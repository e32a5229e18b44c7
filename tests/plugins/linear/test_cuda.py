"""Which kernel a dense layer launches, and what Gluon's does; no GPU needed."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from hemiola.plugins.gpu.compile import compile_call
from hemiola.plugins.gpu.cover import calls_at
from hemiola.plugins.gpu.device import SHARED, Gpu
from hemiola.plugins.gpu.launch import launches
from hemiola.plugins.gpu.lines import pack_lines
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.linear import coded, e4m3
from hemiola.plugins.linear.cuda import best, every_tile, fused, variants

H200 = Gpu(90, 132)
GLUON = sorted(tile for tile in table_of(90).tiles() if tile.consumers)
DIRECT = (
    Tile(16, 8, 128, 8, 2, True, group=2, direct=True),
    Tile(32, 8, 128, 4, 2, True, group=3, direct=True),
)
HALF = torch.bfloat16
FLOATS = re.compile(r"^\s*((?:ex2|div|fma|mul|add|sub|neg|max|rcp|cvt)\.[\w.]*f32[\w.]*)\s", re.M)


def made(*shape: int, dtype: torch.dtype = HALF, device: str = "meta") -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


def launched(launcher, *arguments, gpu: Gpu = H200, **options) -> set[str]:
    return {call.kernel for call in calls_at(launcher, gpu, *arguments, **options)}


def test_gluon_is_launched_where_it_was_measured() -> None:
    x, weight = made(256, 4096), made(12352, 4096)
    assert launched(fused, x, weight) == {"linear._dense"}
    assert launched(fused, x[:128], weight) == {"linear._persistent"}
    assert launched(fused, x, weight, gpu=Gpu(100, 132)) == {"linear._tiles"}
    assert launched(best, x, weight, made(0)) == {"linear._persistent", "linear._best_part"}


def test_what_gluon_does_not_take_is_tritons() -> None:
    x, weight = made(256, 4096), made(12352, 4096)
    assert launched(fused, x.half(), weight.half()) == {"linear._persistent"}
    assert launched(fused, x.float(), weight.float()) == {"linear._tiles"}
    assert launched(fused, made(256, 4097)[:, 1:], weight) == {"linear._tiles"}
    assert launched(fused, x, weight, None, made(256, 12352).float()) == {"linear._persistent"}
    assert launched(fused, x, weight, None, made(256, 12352)) == {"linear._dense"}
    wide = made(24576, 4096)  # 192 x 256, beside a residual
    assert launched(fused, x, wide) == {"linear._dense"}
    assert launched(fused, x, wide, None, made(256, 24576)) == {"linear._persistent"}


def test_what_is_interpreted_is_tritons() -> None:
    seen = []
    with launches(lambda kernel, *rest: seen.append(kernel.entry)):
        fused(made(256, 64, device="cpu"), made(12352, 64, device="cpu"))
    assert seen == ["_persistent"]


def test_every_tile_of_gluon_is_compiled_but_for_the_best() -> None:
    most, x, weight, y = Size(8192, 64, 9), made(8192, 4096), made(12352, 4096), made(8192, 12352)
    assert set(GLUON) <= {v.options["tile"] for v in every_tile(most, 12352, x, weight, y)}
    with_residual = {v.options["tile"] for v in every_tile(most, 12352, x, weight, y, y)}
    assert with_residual & set(GLUON) == {tile for tile in GLUON if tile.tokens <= 128}
    assert not {v.options["tile"] for v in variants(most, x, weight, made(0), ending="argmax")} & set(GLUON)


WIDE_KINDS = [
    Layout("e4m3", 128), Layout("int4", 32, ("zeros",)), Layout("e2m1", 16, ("divisor",)), Layout("int8", 0),
]  # fmt: skip
NARROW_KINDS = [Layout("e4m3", 128, (), "group"), Layout("e4m3", 0, (), "static")]


def packed(layout: Layout, num_outputs: int, num_inputs: int) -> torch.Tensor:
    pack = pack_lines if layout.inputs else pack_words
    return pack(WeightGroup.empty(layout, (num_outputs, num_inputs)))


def launched_over(layout: Layout, x: torch.Tensor, num_outputs: int = 4096, **options) -> set[str]:
    """Of a layer over codes."""
    module, weight = e4m3 if layout.inputs else coded, packed(layout, num_outputs, x.shape[1])
    given = (x, weight, made(0), num_outputs, layout)
    return {name.partition("._")[2] for name in launched(module.linear, *given, **options)}


def test_many_tokens_of_codes_are_multiplied_by_gluon_where_that_was_measured() -> None:
    x, (kind, *_), (narrow, *_) = made(512, 4096), WIDE_KINDS, NARROW_KINDS
    assert launched_over(kind, x) == {"unpack", "dense_steps"}
    assert launched_over(narrow, x) == launched_over(narrow, x[:1], 12288) == {"round", "dense_e4m3"}
    for other in (x[:511], x.half(), x.float(), made(512, 4097)[:, 1:]):
        assert launched_over(kind, other) == {"coded"}
    assert launched_over(kind, x, gpu=Gpu(100, 132)) == launched_over(kind, x, 248320) == {"coded"}
    assert launched_over(narrow, x, gpu=Gpu(100, 132)) == launched_over(narrow, x.half()) == {"round", "e4m3"}
    assert launched_over(Layout("e4m3", 48), x) == {"coded"}  # steps of 16 inputs
    assert launched_over(kind, x, 4100) == {"coded"}


@pytest.mark.parametrize("layout", [*WIDE_KINDS, *NARROW_KINDS], ids=str)
def test_what_is_multiplied_step_by_step_fits_and_is_fused_with_no_sum(layout: Layout) -> None:
    """But where the law says so: sums of products of e4m3 times the scale of the outputs."""
    module, weight = e4m3 if layout.inputs else coded, packed(layout, 256, 512)
    given = (made(512, 512), weight, made(256), 256, layout, made(512, 256))
    kernel = "linear._dense_e4m3" if layout.inputs else "linear._dense_steps"
    found = [call for call in calls_at(module.linear, H200, *given) if call.kernel == kernel]
    ptx = compile_call(found[0], 90).ptx
    products = {line.split()[0] for line in ptx.splitlines() if "wgmma.mma_async" in line}
    assert len(found) == 1 and all((".e4m3.e4m3" in name) == bool(layout.inputs) for name in products)
    assert products and ("fma.rn.f32" in FLOATS.findall(ptx)) == bool(layout.inputs)


NARROW_TILES = [many.tile for many in table_of(90).steps]


@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: f"{tile.outputs}x{tile.tokens}")
def test_inputs_in_e4m3_have_room_in_every_tile(tile: Tile) -> None:
    """Whatever number of steps: one behind the other where no more divide it."""
    for layout, (num_inputs, abreast) in itertools.product(NARROW_KINDS, ((512, tile.abreast), (640, 1))):
        weight, residual = packed(layout, 256, num_inputs), made(40, 256)
        given = (made(40, num_inputs), weight, made(256), 256, layout, residual, "", tile)
        _, call = sorted(calls_at(e4m3.linear, H200, *given), key=lambda call: "_round" not in call.kernel)
        assert dict(call.constants)["ABREAST"] == abreast
        assert compile_call(call, 90).binary.shared <= SHARED[90]


@pytest.mark.parametrize("num_tokens, box", [(1, 16), (16, 16), (17, 32), (33, 64), (512, 128)])
def test_few_inputs_in_e4m3_come_in_boxes_of_few_tokens(num_tokens: int, box: int) -> None:
    """A box that reaches beyond the last token takes longer."""
    layout = NARROW_KINDS[0]
    given = (made(num_tokens, 4096), packed(layout, 4096, 4096), made(0), 4096, layout)
    kinds = {call.kernel: call.kinds for call in calls_at(e4m3.linear, H200, *given)}
    assert kinds["linear._dense_e4m3"][0] == f"<fp8e4nv {box} 128>"


def ptx_of(tile: Tile, activation: str, biased: bool, adds: bool) -> str:
    x, weight = made(512, 512), made(1536, 512)
    residual = made(512, 768 if activation == "swiglu" else 1536) if adds else None
    options = (made(1536) if biased else None, residual, activation)
    (call,) = calls_at(fused, H200, x, weight, *options, tile=tile)
    return compile_call(call, 90).ptx


@pytest.mark.parametrize("tile", GLUON, ids=lambda tile: f"{tile.outputs}x{tile.tokens}")
def test_gluon_computes_by_the_same_instructions(tile: Tile) -> None:
    """In every tile, so that all fit, too; no product is fused with a sum."""
    plain = table_of(90).many[0].tile
    for activation, adds in (("none", True), ("relu2", False), ("swiglu", False), ("swiglu", True)):
        theirs, ours = (set(FLOATS.findall(ptx_of(t, activation, True, adds))) for t in (plain, tile))
        assert ours == theirs and ours, (activation, adds)
        assert not any(word.startswith("fma") for word in ours)


@pytest.mark.parametrize(
    "layout", [Layout("int4", 64, ("zeros",)), Layout("e2m1", 16, ("factor",)), Layout("e4m3", 128)], ids=str
)
def test_codes_go_straight_to_who_multiplies_few_tokens(layout: Layout) -> None:
    """No product is fused with a sum, and several programs share a multiprocessor."""
    weight = packed(layout, 256, 512)
    for tile in DIRECT:
        given = (made(9, 512), weight, made(256), 256, layout, made(9, 256), "", tile)
        (call,) = calls_at(coded.linear, H200, *given)
        found = compile_call(call, 90)
        assert call.kernel == "linear._coded_few" and "mma.sync" in found.ptx
        assert found.binary.shared <= SHARED[90] // 4 and "fma.rn.f32" not in FLOATS.findall(found.ptx)


def test_the_best_of_few_tokens_is_found_by_gluon_too() -> None:
    x, kind = made(8, 4096), Layout("int4", 128)
    found = launched_over(kind, x, 248320, ending="argmax")
    assert found == {"coded_few", "best_part"}
    assert launched_over(kind, x, 248321, ending="argmax") == {"coded", "best_part"}


def test_other_codes_lines_and_architectures_are_tritons_for_few_tokens_too() -> None:
    x, kind = made(8, 4096), Layout("int4", 128)
    assert launched_over(kind, x) == launched_over(kind, x, 12288) == {"coded_few"}
    assert launched_over(kind, made(9, 4096)) == launched_over(kind, x, gpu=Gpu(100, 132)) == {"coded"}
    for tile in DIRECT:
        for other in (x.half(), x.float(), made(8, 4097)[:, 1:]):
            assert launched_over(kind, other, tile=tile) == {"coded"}
        for layout in (Layout("int8", 128, ("zeros",)), Layout("int4", 32)):
            assert launched_over(layout, x, tile=tile) == {"coded"}  # 8 bits with zeros; two steps a block
        assert launched_over(kind, x, 4100, tile=tile) == {"coded"}
