"""Tiles of dense layers by GPU. They are data, with what was measured: `tables/`. None changes a bit."""

import itertools
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hemiola.plugins.gpu.device import Gpu

TABLES = Path(__file__).parent / "tables"
ENDLESS = float("inf")


class Tile(NamedTuple):
    """How a kernel cuts a dense layer."""

    outputs: int
    tokens: int
    inner: int
    warps: int
    stages: int
    weight_first: bool  # outputs on the rows of the tensor core's instruction, tokens on its columns
    is_persistent: bool = False  # tensor descriptors (TMA), a program per multiprocessor
    group: int = 8  # token tiles that go along the outputs together; direct: programs of a multiprocessor
    consumers: int = 0  # of Gluon's kernel, each of 64 outputs; 0: Triton's kernels
    abreast: int = 0  # steps of a quantised weight that are multiplied side by side; 0: one by one
    direct: bool = False  # Gluon's: codes are widened in the registers that multiply

    def parts(self) -> int:
        """In how many parts a persistent kernel stores a tile; two leave room for another stage."""
        return 2 if self.outputs * self.tokens > 128 * 128 else 1


class Few(NamedTuple):
    """The tile for at most so many tokens and at least so many outputs; the first that fits counts."""

    max_tokens: float
    min_outputs: int
    tile: Tile
    bits: int = 0  # of a code, if it is for such alone


class Many(NamedTuple):
    """A tile for many tokens, and the share of the widest tile's speed that it reaches."""

    tile: Tile
    speed: float
    min_tokens: int = 0  # fewer were not measured
    whole: bool = False  # only where tokens fill its tiles: boxes that reach beyond the last one take longer
    max_tokens: float = ENDLESS


class Crowd(NamedTuple):
    """The tile for experts that get at most so many pairs of token and expert each, on average."""

    max_pairs: float
    tile: Tile
    bits: int = 0  # of a code, if it is for such alone


class Table(NamedTuple):
    """One file of `tables/`."""

    few: tuple[Few, ...]
    many: tuple[Many, ...]  # none: the last of few has no limit
    experts: tuple[Crowd, ...]
    codes: tuple[Few, ...]  # of quantised weights; inner: inputs of a turn of the loop, of a block at least
    codes_many: tuple[Many, ...]  # of Gluon's, for lines that descriptors may describe
    steps: tuple[Many, ...]  # of Gluon's, for inputs in e4m3
    coded_experts: tuple[Crowd, ...]

    def tiles(self) -> set[Tile]:
        return {choice.tile for part in self[:3] for choice in part}


FALLBACK = Tile(64, 64, 32, 4, 2, True)  # fp32, and lines that no descriptor may describe


@lru_cache
def table_of(capability: int) -> Table:
    """That of the GPU's architecture, or the one for GPUs that nobody measured."""
    file = TABLES / f"sm_{capability}.json"
    tables = json.loads((file if file.is_file() else TABLES / "any.json").read_text())

    def rows(name: str, kind: Any) -> tuple[Any, ...]:
        told = ({f: _value(row[f]) for f in kind._fields if f in row} for row in tables[name])
        return tuple(kind(**row) for row in told)

    return Table(rows("few", Few), rows("many", Many), rows("experts", Crowd), rows("codes", Few),
                 rows("codes_many", Many), rows("steps", Many), rows("coded_experts", Crowd))  # fmt: skip


def _value(value: Any) -> Any:
    return Tile(**value) if isinstance(value, dict) else ENDLESS if value is None else value


def tile_of(num_tokens: int, num_outputs: int, gpu: Gpu, in_gluon: bool = True) -> Tile:
    """Few tokens: the measured choice. Many: the tile whose last wave wastes least."""
    table = table_of(gpu.capability)
    few = _few(table, num_tokens, num_outputs, in_gluon)
    if few is not None:
        return few

    return _least(table.many, num_tokens, num_outputs, gpu, in_gluon).tile


def _least(many: tuple[Many, ...], num_tokens: int, num_outputs: int, gpu: Gpu, in_gluon: bool) -> Many:
    def cost(choice: Many) -> float:
        tile = choice.tile
        num_tiles = -(-num_tokens // tile.tokens) * -(-num_outputs // tile.outputs)
        return -(-num_tiles // gpu.multiprocessors) * tile.tokens * tile.outputs / choice.speed

    def may(choice: Many) -> bool:
        fills = num_tokens % choice.tile.tokens == 0 or not choice.whole
        fits = choice.min_tokens <= num_tokens <= choice.max_tokens
        return fills and fits and (in_gluon or not choice.tile.consumers)

    return min(filter(may, many), key=cost)


def tiles_for(num_outputs: int, gpu: Gpu) -> set[Tile]:
    """All that `tile_of` may choose, on any GPU of the architecture."""
    table = table_of(gpu.capability)
    ways = itertools.product({choice.max_tokens for choice in table.few}, (False, True))
    few = {_few(table, limit, num_outputs, in_gluon) for limit, in_gluon in ways}
    return {tile for tile in few if tile is not None} | {choice.tile for choice in table.many}


def _few(table: Table, num_tokens: float, num_outputs: int, in_gluon: bool) -> Tile | None:
    for choice in table.few:
        may = in_gluon or not choice.tile.consumers
        if may and num_tokens <= choice.max_tokens and num_outputs >= choice.min_outputs:
            return choice.tile
    return None


def coded_tile_of(
    num_tokens: int, num_outputs: int, bits: int, gpu: Gpu, may: Callable[[Tile], bool]
) -> Tile:
    """For a quantised weight, among the tiles that may serve it."""
    table = table_of(gpu.capability)
    many = tuple(choice for choice in table.codes_many if may(choice.tile))
    if many and num_tokens >= min(choice.min_tokens for choice in many):
        return _least(many, num_tokens, num_outputs, gpu, True).tile
    return _few_codes(table, num_tokens, num_outputs, bits, may)


def coded_tiles(num_outputs: int, gpu: Gpu, in_gluon: bool, is_stored: bool = True) -> set[Tile]:
    """All that `coded_tile_of` may choose, whatever may serve."""
    table = table_of(gpu.capability)
    few = {
        _few_codes(table, choice.max_tokens, num_outputs, bits, may)
        for choice in table.codes
        for bits in (4, 8)
        for may in ((lambda tile: not tile.direct), (lambda tile: in_gluon or not tile.direct))
    }
    return few | {many.tile for many in table.codes_many if in_gluon and is_stored}


def steps_tile_of(num_tokens: int, num_outputs: int, gpu: Gpu) -> Tile | None:
    """Of Gluon's for inputs in e4m3, if the architecture has it."""
    many = table_of(gpu.capability).steps
    return _least(many, num_tokens, num_outputs, gpu, True).tile if many else None


def _few_codes(
    table: Table, num_tokens: float, num_outputs: int, bits: int, may: Callable[[Tile], bool]
) -> Tile:
    choices = (choice for choice in table.codes if choice.bits in (0, bits) and may(choice.tile))
    return next(c.tile for c in choices if num_tokens <= c.max_tokens and num_outputs >= c.min_outputs)


def coded_expert_tile_of(num_pairs: int, num_experts: int, bits: int, gpu: Gpu) -> Tile:
    crowds = (crowd for crowd in table_of(gpu.capability).coded_experts if crowd.bits in (0, bits))
    return next(crowd.tile for crowd in crowds if num_pairs <= crowd.max_pairs * num_experts)


def expert_tile_of(num_pairs: int, num_experts: int, gpu: Gpu, is_described: bool) -> Tile:
    """The tile for so many pairs of token and expert."""
    crowds = table_of(gpu.capability).experts
    tile = next(crowd.tile for crowd in crowds if num_pairs <= crowd.max_pairs * num_experts)
    return tile if is_described or not tile.is_persistent else FALLBACK


def crowds(gpu: Gpu) -> list[float]:
    """Up to how many pairs per expert a tile is chosen."""
    return [crowd.max_pairs for crowd in table_of(gpu.capability).experts if crowd.max_pairs != ENDLESS]
