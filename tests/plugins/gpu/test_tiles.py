"""Tile tables: data that every choice comes from."""

import json
import random

import pytest

from hemiola.plugins.gpu import tiles
from hemiola.plugins.gpu.device import Gpu

CAPABILITIES = (80, 86, 89, 90, 100, 120, 121)


@pytest.mark.parametrize("path", sorted(tiles.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_a_table_says_where_it_was_measured(path: tiles.Path) -> None:
    table = json.loads(path.read_text())
    assert table["gpu"] and table["measured"]
    assert path.stem == "any" or all(row["measured"] for row in table["few"] + table["experts"])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_choice_is_among_those_that_are_compiled(capability: int) -> None:
    """Of few and many tokens and outputs, on small and large GPUs of the architecture."""
    rng = random.Random(capability)
    for _ in range(2000):
        num_tokens, num_outputs = (int(2 ** rng.uniform(0, top)) for top in (14, 18))
        gpu = Gpu(capability, rng.randrange(16, 200))
        chosen = tiles.tile_of(num_tokens, num_outputs, gpu)
        assert chosen in tiles.tiles_for(num_outputs, gpu)
        assert capability == 90 or not chosen.is_persistent


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "outputs", "tokens", "consumers"),
    [  # what was the best of all, or equal to it, when every tile was timed (benchmarks/gpu_dense.md)
        (64, 4096, 64, 64, 1), (64, 12352, 64, 64, 1), (64, 24576, 64, 64, 1), (64, 8224, 128, 64, 0),
        (65, 24576, 192, 128, 3), (128, 24576, 192, 128, 3), (128, 12352, 128, 128, 0),
        (128, 10304, 128, 128, 0), (192, 4096, 128, 64, 0), (129, 12352, 192, 128, 3),
        (192, 12352, 192, 128, 3), (256, 12352, 192, 128, 3),
        (256, 10304, 192, 128, 3), (256, 24576, 192, 256, 3), (256, 4096, 64, 128, 1),
        (512, 4096, 128, 128, 2), (512, 24576, 192, 256, 3), (512, 12352, 192, 256, 3),
        (512, 10304, 192, 256, 3), (1024, 4096, 256, 128, 0), (1024, 10304, 128, 128, 2),
        (8192, 12352, 192, 256, 3), (256, 15680, 256, 128, 0),
    ],
)  # fmt: skip
def test_the_cost_of_waves_finds_the_best_of_what_was_measured(
    num_tokens: int, num_outputs: int, outputs: int, tokens: int, consumers: int
) -> None:
    tile = tiles.tile_of(num_tokens, num_outputs, Gpu(90, 132))
    assert (tile.outputs, tile.tokens, tile.consumers) == (outputs, tokens, consumers)


def test_gluon_has_only_tiles_that_were_measured_and_none_where_it_may_not() -> None:
    gpu = Gpu(90, 132)
    for num_tokens in (*range(1, 129), 256, 8192):
        for num_outputs in (96, 1024, 4096, 12352, 24576):
            own = tiles.tile_of(num_tokens, num_outputs, gpu, in_gluon=False)
            assert own.consumers == 0
            least = 33 if num_outputs >= 4096 else 129  # wide and deep layers from 33 on
            assert num_tokens >= least or tiles.tile_of(num_tokens, num_outputs, gpu) == own


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gluons_tiles_are_for_one_architecture(capability: int) -> None:
    found = {tile for tile in tiles.table_of(capability).tiles() if tile.consumers}
    assert bool(found) == (capability == 90)
    assert all(tile.outputs == 64 * tile.consumers and tile.is_persistent for tile in found)


def test_experts_without_whole_lines_take_no_descriptors() -> None:
    gpu = Gpu(90, 132)
    assert tiles.expert_tile_of(8192 * 8, 8, gpu, is_described=True).is_persistent
    assert tiles.expert_tile_of(8192 * 8, 8, gpu, is_described=False) == tiles.FALLBACK
