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


def test_experts_without_whole_lines_take_no_descriptors() -> None:
    gpu = Gpu(90, 132)
    assert tiles.expert_tile_of(8192 * 8, 8, gpu, is_described=True).is_persistent
    assert tiles.expert_tile_of(8192 * 8, 8, gpu, is_described=False) == tiles.FALLBACK
