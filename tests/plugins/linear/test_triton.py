"""The dense layer on CUDA, in Triton and Gluon: against fp64, and the same bits in every tile."""

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.tiles import FALLBACK, Tile, table_of
from hemiola.plugins.linear import cuda
from hemiola.plugins.linear.cuda import best, fused, linear
from tests.gpu.laws import (
    DEVICE,
    HALF,
    INTERPRETED,
    LENGTHS,
    apart,
    needs_memory,
    on_gpu,
    poisoned,
    randn,
    rows_are_alone,
    same_bits,
)

pytestmark = on_gpu

SHAPES = (
    [(40, 96), (7, 24)] if INTERPRETED else [(4096, 4096), (2688, 1856), (257, 2048), (1024, 3584), (100, 72)]
)
# fewer warps and other inner lengths than any table has, for the law that they do not matter
ODD_TILES = (Tile(16, 16, 256, 4, 4, True), Tile(16, 16, 64, 1, 2, True), Tile(32, 32, 32, 2, 3, False))
ALL_TILES = table_of(90).tiles() | table_of(0).tiles() | {FALLBACK} | set(ODD_TILES)
GLUON = sorted(tile for tile in ALL_TILES if tile.consumers)  # for sm_90; nothing interprets it
TILES = sorted(ALL_TILES - set(GLUON))[:: 5 if INTERPRETED else 1]
HAS_GLUON = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
TILES += GLUON if HAS_GLUON else []
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="needs a GPU of sm_90")
ENDS = [  # activation, with a bias, with a residual; with both stands above
    ("none", False, False), ("none", True, False), ("none", False, True), ("relu2", False, False),
    ("swiglu", False, False), ("swiglu", False, True),
]  # fmt: skip
ACTIVATIONS = pytest.mark.parametrize("activation", ["none", "relu2", "swiglu"])


def make(
    num_outputs: int, num_inputs: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        randn(num_tokens, num_inputs),
        randn(num_outputs, num_inputs) * num_inputs**-0.5,
        randn(num_outputs),
    )


def truth(x, weight, bias=None, residual=None, activation="none") -> torch.Tensor:
    y = x.double() @ weight.double().t()
    y = y if bias is None else y + bias.double()
    if activation == "relu2":
        y = y.relu().square()
    if activation == "swiglu":
        gate, value = y.unflatten(1, (-1, 2, 8)).unbind(2)
        y = (torch.nn.functional.silu(gate) * value).flatten(1)
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_against_fp64(num_outputs: int, num_inputs: int, num_tokens: int) -> None:
    x, weight, bias = make(num_outputs, num_inputs, num_tokens)
    with poisoned():
        y = linear(apart(x), apart(weight), bias)
        plain = linear(x, weight, bias[:0])
    assert rel_error(y, truth(x, weight, bias)) < 4e-3 and y.is_contiguous()
    assert rel_error(plain, truth(x, weight)) < 4e-3


@ACTIVATIONS
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_against_fp64(tile: Tile, activation: str) -> None:
    x, weight, bias = make(416, 96, 33) if INTERPRETED else make(1056, 1096, 333)
    residual = randn(len(x), len(weight) // 2 if activation == "swiglu" else len(weight))
    with poisoned():
        y = fused(apart(x), weight, bias, apart(residual), activation, tile)
    assert rel_error(y, truth(x, weight, bias, residual, activation)) < 4e-3


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
@ACTIVATIONS
@pytest.mark.parametrize("num_outputs, num_inputs", [(4096, 4096), (1056, 1096), (384, 12288)])
def test_every_tile_has_the_same_bits(num_outputs: int, num_inputs: int, activation: str) -> None:
    x, weight, bias = make(num_outputs, num_inputs, 300)
    residual = randn(len(x), num_outputs // 2 if activation == "swiglu" else num_outputs)
    wanted = fused(x, weight, bias, residual, activation, TILES[0])
    for tile in TILES:
        assert same_bits(fused(x, weight, bias, residual, activation, tile), wanted), tile


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_outputs_that_fill_a_line_up_change_no_bit_of_others(tile: Tile) -> None:
    """A router's 257 become 264; on a GPU beside the tile that takes lines of any width."""
    num, num_inputs = (33, 96) if INTERPRETED else (257, 2048)
    x, weight, _ = make(-(-num // 8) * 8, num_inputs, 5 if INTERPRETED else 48)
    zeros = torch.cat([weight[:num], torch.zeros_like(weight[num:])])
    found = [fused(x, filled, tile=tile)[:, :num].contiguous() for filled in (weight, zeros)]
    assert same_bits(*found)
    assert INTERPRETED or same_bits(found[0], fused(x, weight[:num], tile=FALLBACK))


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
def test_sums_have_the_same_bits_before_they_are_rounded() -> None:
    """A sum, and the sum less what it rounds to, leave 16 bits of the fp32 chain."""
    x, weight, _ = make(512, 2048, 200)
    rounded = fused(x, weight, tile=TILES[0])
    rest = fused(x, weight, residual=-rounded, tile=TILES[0])
    assert rest.any()
    for tile in TILES:
        assert same_bits(fused(x, weight, residual=-rounded, tile=tile), rest), tile


@needs_gluon
@pytest.mark.parametrize("activation, biased, adds", ENDS)
@pytest.mark.parametrize("tile", GLUON, ids=str)
def test_gluon_has_tritons_bits(tile: Tile, activation: str, biased: bool, adds: bool) -> None:
    """Tiles that end within and beyond the layer, more tiles than programs, lines with NaN between."""
    plain = next(many.tile for many in table_of(90).many)
    for sizes in (
        (1, 96, 64), (129, 12352, 512), (200, 10304, 1096), (256, 4096, 1856), (257, 96, 72),
        (511, 24576, 320), (1000, 2688, 4096),
    ):  # fmt: skip
        num_tokens, num_outputs, num_inputs = sizes
        x, weight, bias = make(num_outputs, num_inputs, num_tokens)
        residual = randn(num_tokens, num_outputs // 2 if activation == "swiglu" else num_outputs)
        end = (bias if biased else None, apart(residual) if adds else None, activation)
        wanted = fused(x, weight, *end, plain)
        for _ in range(3):
            with poisoned():
                y = fused(apart(x), apart(weight), *end, tile)
            assert torch.equal(y.view(torch.int16), wanted.view(torch.int16)), sizes


@needs_gluon
@pytest.mark.parametrize("tile", GLUON, ids=str)
def test_a_row_is_alone_in_gluon(tile: Tile) -> None:
    x, weight, bias = make(1056, 1096, 1000)
    rows_are_alone(lambda x: fused(x, weight, bias, tile=tile), x, lengths=(1, 64, 129, 257, 511))


@needs_gluon
def test_numbers_that_are_none_end_where_tritons_do(
    poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two programs, which go from tile to tile: also for compute-sanitizer (scripts/gpu_sanitize.py)."""
    gpu = cuda.gpu_of(torch.device(DEVICE))
    monkeypatch.setattr(cuda, "gpu_of", lambda device: gpu._replace(multiprocessors=2))
    x, weight, _ = make(320, 128, 200)
    x[3, 5], x[7, 0], x[130], weight[100] = torch.inf, torch.nan, 0.0, 0.0
    residual = -fused(x, weight, tile=FALLBACK)
    for activation, added in (("none", residual), ("relu2", None), ("swiglu", residual[:, :160])):
        wanted = fused(x, weight, None, added, activation, FALLBACK)
        for tile in GLUON:
            y = fused(x, weight, None, added, activation, tile)
            torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
@pytest.mark.parametrize("num_outputs, num_inputs", [(4096, 4096), (257, 2048), (2688, 1856)])
def test_a_row_is_alone(num_outputs: int, num_inputs: int) -> None:
    x, weight, bias = make(num_outputs, num_inputs, 2200)
    rows_are_alone(lambda x: linear(x, weight, bias), x)


def test_fp32_against_fp64() -> None:
    x, weight = randn(20, 200, dtype=torch.float32), randn(70, 200, dtype=torch.float32)
    assert rel_error(linear(x, weight, randn(0, dtype=torch.float32)), truth(x, weight)) < 1e-6
    if not INTERPRETED:
        rows_are_alone(lambda x: linear(x, weight, weight.new_empty(0)), x, lengths=(1, 2, 7, 16))


@pytest.mark.parametrize("num_tokens", LENGTHS[:6])
def test_best_is_the_first_highest_of_the_stored_outputs(num_tokens: int) -> None:
    x, weight, bias = make(100, 40, num_tokens) if INTERPRETED else make(13000, 1024, num_tokens)
    for given in (bias, bias[:0]):
        with poisoned():
            lines, (value, output) = linear(x, weight, given).tolist(), best(x, weight, given)
        assert output.tolist() == [line.index(max(line)) for line in lines]
        assert value.tolist() == [max(line) for line in lines] and output.dtype is torch.int64


def test_best_takes_the_lowest_of_equals() -> None:
    weight = torch.zeros(300, 32, dtype=HALF, device=DEVICE)
    weight[[70, 71, 250]] = 1.0
    x = torch.ones(3, 32, dtype=HALF, device=DEVICE)
    for sign, wanted in ((1, (32, 70)), (-1, (0, 0))):
        value, output = best(sign * x, weight, x[0, :0])
        assert value.tolist() == 3 * [wanted[0]] and output.tolist() == 3 * [wanted[1]]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_best_of_a_broken_line_is_no_number(wrong: float) -> None:
    """One weight of many; -inf alone leaves others to choose."""
    x, weight, bias = make(200, 32, 3)
    weight[130], x[1] = 0.0, 1.0
    weight[130, 5], x[0, 5], x[2, 5] = wrong, 0.5, 2.0
    value, output = best(x, weight, bias[:0])
    assert (value.isfinite() == (wrong == -torch.inf)).all()
    assert ((output == 130) == (wrong != -torch.inf)).all()


@needs_memory
def test_weights_and_outputs_behind_two_to_the_31() -> None:
    weight = torch.zeros(1_100_000, 2048, dtype=HALF, device=DEVICE)
    weight[-5:] = randn(5, 2048)
    x = randn(2100, 2048)
    for num_tokens in (1, 64, 2100):
        y = linear(x[:num_tokens], weight, x.new_empty(0))
        assert rel_error(y[-1:, -5:], truth(x[num_tokens - 1 : num_tokens], weight[-5:])) < 4e-3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="weight has the shape"):
        linear(randn(2, 8), randn(3, 9), randn(0))
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        fused(randn(2, 8), randn(3, 8), activation="gelu")
    with pytest.raises(ValueError, match="24 outputs are not eight gates"):
        fused(randn(2, 8), randn(24, 8), activation="swiglu")
    assert linear(randn(0, 8), randn(3, 8), randn(0)).shape == (0, 3)
