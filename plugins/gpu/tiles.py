"""Tiles of dense layers by GPU: data, measured in benchmarks/gpu_dense.md. No choice here changes a bit."""

from typing import NamedTuple

from hemiola.plugins.gpu.device import Gpu


class Tile(NamedTuple):
    """How a kernel cuts a dense layer."""

    outputs: int
    tokens: int
    inner: int
    warps: int
    stages: int
    weight_first: bool  # outputs on the rows of the tensor core's instruction, tokens on its columns
    is_persistent: bool = False  # tensor descriptors (TMA), a program per multiprocessor
    group: int = 8  # token tiles that go along the outputs together

    def parts(self) -> int:
        """In how many parts a persistent kernel stores a tile; two leave room for another stage."""
        return 2 if self.outputs * self.tokens > 128 * 128 else 1


class TileChoice(NamedTuple):
    """The tile for at most so many tokens and at least so many outputs; the first that fits counts."""

    max_tokens: int
    min_outputs: int
    tile: Tile


class Wide(NamedTuple):
    """A tile for many tokens, and the share of the widest tile's speed that it reaches."""

    tile: Tile
    speed: float


SM90 = (
    TileChoice(16, 8192, Tile(64, 16, 64, 4, 6, True)),
    TileChoice(16, 0, Tile(64, 16, 256, 4, 4, True, True)),
    TileChoice(32, 8192, Tile(64, 32, 64, 4, 6, True)),
    TileChoice(32, 0, Tile(64, 16, 256, 4, 4, True, True)),
    TileChoice(64, 16384, Tile(64, 64, 128, 4, 5, True, True)),
    TileChoice(64, 8192, Tile(128, 64, 64, 4, 6, True, True)),
    TileChoice(64, 2560, Tile(64, 32, 128, 4, 5, True)),
    TileChoice(64, 0, Tile(64, 16, 256, 4, 4, True, True)),
)
# swiglu: gates and values in one tile, which is no tensor core's left operand as a descriptor brings it
SM90_PAIRS = (
    TileChoice(16, 0, Tile(64, 16, 64, 4, 6, True)),
    TileChoice(32, 0, Tile(64, 32, 64, 4, 6, True)),
    TileChoice(64, 0, Tile(128, 64, 64, 4, 4, True)),
)
SM90_WIDE = (
    Wide(Tile(256, 128, 64, 8, 4, False, True), 1.0),
    Wide(Tile(128, 128, 64, 4, 5, False, True), 0.95),
    Wide(Tile(128, 64, 64, 4, 6, True, True), 0.667),
    Wide(Tile(64, 64, 128, 4, 5, True, True), 0.49),
)
# GPUs that nobody measured: little shared memory, and one shape of the tensor core's instruction
OTHERS = (
    TileChoice(32, 0, Tile(128, 16, 32, 4, 4, True)),
    TileChoice(1 << 31, 0, Tile(128, 64, 32, 4, 3, True)),
)
FALLBACK = Tile(64, 64, 32, 4, 2, True)  # fp32, and lines that no descriptor may describe


def tile_of(num_tokens: int, num_outputs: int, gpu: Gpu, is_paired: bool) -> Tile:
    """Few tokens: the measured choice. Many: the tile whose last wave wastes least."""
    choices = OTHERS if gpu.capability != 90 else SM90_PAIRS if is_paired else SM90
    for choice in choices:
        if num_tokens <= choice.max_tokens and num_outputs >= choice.min_outputs:
            return choice.tile

    def cost(wide: Wide) -> float:
        tile = wide.tile
        num_tiles = -(-num_tokens // tile.tokens) * -(-num_outputs // tile.outputs)
        return -(-num_tiles // gpu.multiprocessors) * tile.tokens * tile.outputs / wide.speed

    return min(SM90_WIDE, key=cost).tile


class Crowd(NamedTuple):
    """The tile for experts that get at most so many pairs each, on average."""

    max_pairs: float
    tile: Tile


SM90_EXPERTS = (
    Crowd(4, Tile(64, 16, 64, 4, 6, True)),
    Crowd(24, Tile(128, 32, 64, 4, 5, True)),
    Crowd(96, Tile(256, 64, 64, 4, 4, False, True)),
    Crowd(float("inf"), Tile(256, 128, 64, 8, 4, False, True)),
)


def expert_tile_of(num_pairs: int, num_experts: int, gpu: Gpu, is_described: bool) -> Tile:
    """The tile for so many pairs of token and expert."""
    if gpu.capability != 90:
        return next(choice.tile for choice in OTHERS if num_pairs <= choice.max_tokens * num_experts)
    tile = next(crowd.tile for crowd in SM90_EXPERTS if num_pairs <= crowd.max_pairs * num_experts)
    return tile if is_described or not tile.is_persistent else FALLBACK
