"""Experts on CUDA."""

import pytest
import torch
from kit.ops import rel_error

pytest.importorskip("triton")

from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.moe.cuda import moe, sort_pairs
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

ACTIVATIONS = pytest.mark.parametrize("activation", ["relu2", "swiglu"])
E, K, F, I = (5, 2, 40, 24) if INTERPRETED else (32, 6, 1024, 464)  # noqa: E741
TILES = [crowd.tile for crowd in table_of(90).experts] + [
    Tile(16, 16, 64, 1, 2, True),
    Tile(32, 32, 32, 2, 3, False),
]


def make(num_tokens: int, activation: str, dtype: torch.dtype = HALF, num_experts: int = E) -> tuple:
    """Arguments of moe; every fourth id is that of one expert."""
    ids = torch.rand(num_tokens, num_experts).topk(K).indices.int().to(DEVICE)
    ids[::2] = torch.where((ids[::2] == 0).any(1, keepdim=True), ids[::2], ids[::2].roll(1, 1))
    up = randn(num_experts, 2 * I if activation == "swiglu" else I, F, dtype=dtype) * F**-0.5
    down = randn(num_experts, F, I, dtype=dtype) * I**-0.5
    weights = torch.rand(num_tokens, K, device=DEVICE)
    return randn(num_tokens, F, dtype=dtype), ids, weights, up, down, activation


def truth(x, ids, weights, up, down, activation) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(up)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = x[token].double() @ up[expert].double().t()
        if activation == "relu2":
            hidden = hidden.relu().square()
        else:
            gate, value = hidden.chunk(2, dim=1)
            hidden = torch.nn.functional.silu(gate) * value
        part = hidden @ down[expert].double().t() * weights[token, slot, None].double()
        y.index_add_(0, token, part)
    return y


@ACTIVATIONS
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_against_fp64(num_tokens: int, activation: str) -> None:
    x, *rest = arguments = make(num_tokens, activation)
    with poisoned():
        y = moe(apart(x), *rest)
    assert rel_error(y, truth(*arguments)) < 6e-3


@ACTIVATIONS
def test_fp32_against_fp64(activation: str) -> None:
    arguments = make(9, activation, torch.float32)
    assert rel_error(moe(*arguments), truth(*arguments)) < 2e-6


@ACTIVATIONS
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_against_fp64(tile: Tile, activation: str) -> None:
    x, *rest = arguments = make(50, activation)
    with poisoned():
        y = moe(apart(x), *rest, tile=tile)
    assert rel_error(y, truth(*arguments)) < 6e-3


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
@ACTIVATIONS
def test_every_tile_has_the_same_bits(activation: str) -> None:
    arguments = make(500, activation)
    arguments[1][7, 2] = -1
    wanted = moe(*arguments, tile=TILES[0])
    for tile in TILES:
        assert same_bits(moe(*arguments, tile=tile), wanted), tile


@pytest.mark.skipif(INTERPRETED, reason="numpy's products are not a GPU's")
@ACTIVATIONS
def test_a_row_is_alone(activation: str) -> None:
    x, ids, weights, *rest = make(2200, activation)
    rows_are_alone(lambda x, i, w: moe(x, i, w, *rest), x, ids, weights)


@pytest.mark.parametrize("num_pairs", [1, 40, 2048, 2049, 5000])
@pytest.mark.parametrize("num_experts", [5, 256])
def test_pairs_stand_by_expert_and_in_order(num_pairs: int, num_experts: int) -> None:
    """Ids that are no experts stand nowhere; of experts without a pair there is no tile."""
    ids = torch.randint(-1, num_experts + 2, (num_pairs, 1), dtype=torch.int32, device=DEVICE)
    ids[ids == 3] = 4
    with poisoned():
        pairs, tiles = sort_pairs(ids, num_experts, 16)
    known = ((ids >= 0) & (ids < num_experts)).flatten()
    wanted = ids.flatten().argsort(stable=True)
    assert pairs[: known.sum()].tolist() == [pair for pair in wanted.tolist() if known[pair]]
    lines, first = [], 0
    for expert in range(num_experts):
        end = first + int((ids == expert).sum())
        lines += [[expert, at, end] for at in range(first, end, 16)]
        first = end
    assert tiles[: len(lines), :3].tolist() == lines
    assert tiles[len(lines) : -1, 0].eq(-1).all() and tiles[-1, 0] == len(lines)


def test_all_tokens_choose_the_same_expert() -> None:
    x, ids, *rest = make(LENGTHS[-1] // 2, "relu2")
    ids[:] = torch.arange(K, device=DEVICE)
    assert rel_error(moe(x, ids, *rest), truth(x, ids, *rest)) < 6e-3


def test_an_id_that_is_no_expert_adds_nothing() -> None:
    x, ids, weights, *rest = make(7, "swiglu")
    ids[3], ids[5, 1] = -1, E
    with poisoned():
        y = moe(x, ids, weights, *rest)
    assert not y[3].any()
    assert rel_error(y, truth(x, ids, weights, *rest)) < 6e-3


@needs_memory
def test_experts_behind_two_to_the_31() -> None:
    x, ids, weights, up, down, activation = make(40, "relu2", num_experts=5000)
    assert up.numel() > 1 << 31
    ids[:, 0] = 4999
    assert (
        rel_error(moe(x, ids, weights, up, down, activation), truth(x, ids, weights, up, down, activation))
        < 6e-3
    )


def test_refusals() -> None:
    x, ids, weights, up, down, _ = make(2, "relu2")
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        moe(x, ids, weights, up, down, "gelu")
    with pytest.raises(ValueError, match="up has the shape"):
        moe(x, ids, weights, up, down, "swiglu")
    with pytest.raises(ValueError, match="side by side"):
        moe(x, ids, weights, up, apart(down), "relu2")
