"""Experts on CUDA with quantised weights."""

from typing import Any

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.launch import Kernel
from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, dequantised
from hemiola.plugins.moe.coded import moe
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
from tests.plugins.linear.test_codes import make as make_group
from tests.plugins.moe.test_triton import truth

pytestmark = on_gpu

E, K, F, I = (5, 2, 80, 48) if INTERPRETED else (32, 6, 1024, 464)  # noqa: E741
LAYOUTS = [
    (Layout("e4m3", 128), Layout("e4m3", 128)), (Layout("e4m3", 0), Layout("e4m3", 0)),
    (Layout("e2m1", 16, ("factor",)), Layout("e2m1", 16, ("factor",))),
    (Layout("int4", 32, ("zeros",)), Layout("int4", 0, ("zeros",))), (Layout("int8", 0), Layout("int4", 128)),
]  # fmt: skip
EACH = pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu2", "swiglu"])
TILES = [crowd.tile for crowd in table_of(90).coded_experts] + [Tile(16, 16, 64, 1, 2, True)]
BITS = pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")


class Experts:
    """Quantised experts, packed, and their numbers."""

    def __init__(self, layouts: tuple[Layout, Layout], activation: str, inner: int = I) -> None:
        shapes = ((E, 2 * inner if activation == "swiglu" else inner, F), (E, F, inner))
        groups = [make_group(layout, *shape) for layout, shape in zip(layouts, shapes, strict=True)]
        for group in groups:  # so that fp16 holds what is between
            size = dequantised(group).std() * group.shape[-1] ** 0.5
            group.tensors["factor" if "factor" in group.tensors else "scales"] /= size
        self.packed = [pack_words(group).to(DEVICE) for group in groups]
        self.numbers = [dequantised(group).to(DEVICE) for group in groups]
        self.rest, self.activation = (inner, *layouts), activation

    def run(self, x, ids, shares, tile: Tile | None = None) -> torch.Tensor:
        return moe(x, ids, shares, *self.packed, self.activation, *self.rest, tile=tile)

    def truth(self, x, ids, shares) -> torch.Tensor:
        return truth(x, ids, shares, *self.numbers, self.activation)


def tokens(num: int, dtype: torch.dtype = HALF) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(num, E).topk(K).indices.int().to(DEVICE)
    return randn(num, F, dtype=dtype), ids, torch.rand(num, K, device=DEVICE)


@EACH
@ACTIVATIONS
def test_against_fp64(activation: str, layouts: tuple[Layout, Layout]) -> None:
    experts = Experts(layouts, activation)
    for num_tokens in LENGTHS[-2:]:
        x, *rest = given = tokens(num_tokens)
        with poisoned():
            y = experts.run(apart(x), *rest)
        assert rel_error(y, experts.truth(*given)) < 6e-3


@ACTIVATIONS
def test_fp32_against_fp64(activation: str) -> None:
    experts, given = Experts(LAYOUTS[2], activation), tokens(9, torch.float32)
    assert rel_error(experts.run(*given), experts.truth(*given)) < 2e-6


@ACTIVATIONS
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_against_fp64(tile: Tile, activation: str) -> None:
    experts, given = Experts(LAYOUTS[3], activation), tokens(20)
    with poisoned():
        assert rel_error(experts.run(*given, tile=tile), experts.truth(*given)) < 6e-3


@BITS
@EACH
@ACTIVATIONS
def test_every_tile_has_the_same_bits(activation: str, layouts: tuple[Layout, Layout]) -> None:
    experts, given = Experts(layouts, activation), tokens(500)
    given[1][7, 2] = -1
    wanted = experts.run(*given, tile=TILES[0])
    for tile in TILES:
        assert same_bits(experts.run(*given, tile=tile), wanted), tile


@pytest.mark.parametrize("inner", [128, 256])
def test_steps_side_by_side_are_no_more_than_there_are(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of two, `down` has two blocks of inputs: half of four steps multiplied nothing."""
    experts, given, seen = Experts(LAYOUTS[0], "swiglu", inner), tokens(20), []
    launch = Kernel._launch

    def look(kernel: Kernel, grid: tuple[int, ...], *values: object, **constants: Any) -> None:
        if kernel.entry == "_coded_experts" and not constants["IS_UP"]:
            seen.append((constants["BLOCKS"], constants["OUTPUTS"]))
        launch(kernel, grid, *values, **constants)

    monkeypatch.setattr(Kernel, "_launch", look)
    y = experts.run(*given, tile=TILES[0])
    assert seen == [(2, 2 * TILES[0].outputs)] and TILES[0].abreast == 4
    assert rel_error(y, experts.truth(*given)) < 6e-3
    other = experts.run(*given, tile=TILES[1])
    assert same_bits(y, other) if not INTERPRETED else rel_error(y, other) < 6e-3


@BITS
@EACH
def test_a_row_is_alone(layouts: tuple[Layout, Layout]) -> None:
    rows_are_alone(Experts(layouts, "swiglu").run, *tokens(2200))


def test_an_id_that_is_no_expert_adds_nothing() -> None:
    experts, (x, ids, shares) = Experts(LAYOUTS[0], "swiglu"), tokens(7)
    ids[3], ids[5, 1] = -1, E
    with poisoned():
        y = experts.run(x, ids, shares)
    assert not y[3].any() and rel_error(y, experts.truth(x, ids, shares)) < 6e-3


def test_refusals() -> None:
    experts, given = Experts(LAYOUTS[0], "relu2"), tokens(2)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        moe(*given, *experts.packed, "gelu", *experts.rest)
    with pytest.raises(ValueError, match="is not packed from"):
        moe(*given, *experts.packed[::-1], "swiglu", *experts.rest)
