"""Which kernel a dense layer launches, and what Gluon's does; no GPU needed."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from hemiola.plugins.gpu.compile import compile_call
from hemiola.plugins.gpu.cover import calls_at
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import launches
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.linear.cuda import best, every_tile, fused, variants

H200 = Gpu(90, 132)
GLUON = sorted(tile for tile in table_of(90).tiles() if tile.consumers)
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
