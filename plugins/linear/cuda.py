"""The dense layer on CUDA: one chain of sums per output, in tiles of any shape, and what may end it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hemiola.plugins.gpu.checks import absent, check, is_described
from hemiola.plugins.gpu.device import SHARED, gpu_of
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Block, Kernel, cdiv
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import FALLBACK, Tile, tile_of, tiles_for

_best_part = Kernel("linear", "_best_part")
_dense = Kernel("linear", "_dense")  # Gluon's
_persistent = Kernel("linear", "_persistent")
_tiles = Kernel("linear", "_tiles")

EARLY, LONG = 512, 8192  # bytes: fetched of a line before its turn, and of a line that needs no such help
ACTIVATIONS = ("none", "relu2", "swiglu")
SLAB, PART = 64, 64  # outputs of one of Gluon's consumers, and tokens that it stores at once
REGISTERS = {1: 0, 2: 240, 3: 160}  # of a consumer's thread; of one consumer a kernel's thread has enough
BARRIERS = 1024  # bytes that are more than enough for a Gluon kernel's


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
    residual: torch.Tensor | None = None,  # [T, O]
    ending: str = "",
    tile: Tile | None = None,
) -> Any:  # [T, O], or what it ends as
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    if ending == "argmax":
        return best(x, weight, bias, tile)
    return fused(x, weight, bias, residual, ending or "none", tile)


def fused(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]; with swiglu eight gates, the eight values that they open, and so on
    bias: torch.Tensor | None = None,  # [O]
    residual: torch.Tensor | None = None,  # [T, O], or [T, O / 2] with swiglu
    activation: str = "none",
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, O], or [T, O / 2]
    """residual + activation(x @ weight.T + bias), in fp32 until the end."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    _check(x, weight)
    num_tokens, num_outputs = x.shape[0], weight.shape[0]
    if activation == "swiglu" and num_outputs % 16:
        raise ValueError(f"linear: {num_outputs} outputs are not eight gates, eight values, and so on")
    width = num_outputs // 2 if activation == "swiglu" else num_outputs
    if bias is not None and absent(bias):
        bias = None
    if bias is not None:
        check("linear", "bias", bias, (num_outputs,), FLOATS, x.device, anywhere=True)
    if residual is not None:
        check("linear", "residual", residual, (num_tokens, width), FLOATS, x.device, 1, True)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        described = [x, weight, y] if residual is None else [x, weight, y, residual]
        tile = tile or _tile_of(described, num_tokens, num_outputs)
        _launch(x, weight, bias, residual, y, None, activation, tile)
    return y


def variants(
    largest: Size,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    ending: str = "",
) -> Iterator[Variant]:
    num_outputs = len(weight)
    if ending == "argmax":
        yield from every_tile(largest, num_outputs, x, weight, is_stored=False)
        return
    y = x.new_empty(len(x), num_outputs // 2 if ending == "swiglu" else num_outputs)
    yield from every_tile(largest, num_outputs, x, weight, y, *([] if residual is None else [residual]))


def every_tile(
    largest: Size, num_outputs: int, *described: torch.Tensor, is_stored: bool = True
) -> Iterator[Variant]:
    """Every tile that may be chosen; how many tokens there are tells a kernel nothing."""
    tiles = tiles_for(num_outputs, gpu_of(described[0].device))
    may = [tile for tile in tiles if not tile.consumers or (is_stored and _in_gluon(tile, described))]
    for tile in {_fitting(tile, described) for tile in may}:
        yield Variant(largest, {"tile": tile})


def best(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T] fp32, [T] int64
    """The highest of linear's outputs, in x's dtype, and the lowest output that has it; none is stored."""
    _check(x, weight)
    num_tokens, num_outputs = x.shape[0], weight.shape[0]
    tile = tile or _fitting(tile_of(num_tokens, num_outputs, gpu_of(x.device), in_gluon=False), [x, weight])
    num_parts = cdiv(num_outputs, tile.outputs)
    values = torch.empty(num_parts, num_tokens, dtype=torch.float32, device=x.device)
    outputs = torch.empty(num_parts, num_tokens, dtype=torch.int32, device=x.device)
    if num_tokens:
        _launch(x, weight, None if absent(bias) else bias, None, values, outputs, "argmax", tile)
    return choose_best(values, outputs)


def choose_best(values: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the best outputs of tiles and their values, [tiles, T]."""
    num_parts, num_tokens = values.shape
    value = torch.empty(num_tokens, dtype=torch.float32, device=values.device)
    output = torch.empty(num_tokens, dtype=torch.int64, device=values.device)
    if num_tokens:
        _best_part[(num_tokens,)](
            values, outputs, output, value, num_tokens, num_parts, BLOCK=4096, num_warps=8
        )  # fmt: skip
    return value, output


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check("linear", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    check("linear", "weight", weight, (None, x.shape[1]), x.dtype, x.device, apart=1, anywhere=True)
    if not weight.numel():
        raise ValueError(f"linear: weight has the shape {list(weight.shape)}")


def _tile_of(described: list[torch.Tensor], num_tokens: int, num_outputs: int) -> Tile:
    gpu = gpu_of(described[0].device)
    tile = tile_of(num_tokens, num_outputs, gpu)
    if tile.consumers and not _in_gluon(tile, described):
        tile = tile_of(num_tokens, num_outputs, gpu, in_gluon=False)
    return _fitting(tile, described)


def _in_gluon(tile: Tile, described: Sequence[torch.Tensor]) -> bool:
    """Whether Gluon's kernel may compute in this tile; the fourth of these tensors is a residual.

    Nothing interprets it on a CPU. A residual lies beside the stages, and 192 x 256 of it leave too few.
    """
    has_room = tile.tokens <= 128 or len(described) < 4
    return has_room and all(
        x.dtype is torch.bfloat16 and x.device.type != "cpu" and is_described(x) for x in described
    )


def _fitting(tile: Tile, described: Sequence[torch.Tensor]) -> Tile:
    """The tile, if these tensors can be read in such."""
    if described[0].dtype is torch.float32:
        return FALLBACK
    return tile if not tile.is_persistent or all(map(is_described, described)) else FALLBACK


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    best: torch.Tensor | None,  # with argmax: the outputs whose values y holds
    activation: str,
    tile: Tile,
) -> None:
    if tile.consumers:
        _launch_gluon(x, weight, bias, residual, y, activation, tile)
        return
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    sizes = (num_tokens, num_outputs, num_inputs)
    how = {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "INNER": tile.inner,
           "WEIGHT_FIRST": tile.weight_first, "ACTIVATION": activation, "BIASED": bias is not None,
           "ADDS": residual is not None, "DTYPE": x.dtype, "EARLY": _early(weight), "num_warps": tile.warps,
           "num_stages": tile.stages - (residual is not None and tile.parts() > 1),
           "enable_fp_fusion": False}  # fmt: skip
    token_tiles, output_tiles = cdiv(num_tokens, tile.tokens), cdiv(num_outputs, tile.outputs)
    bias, best = y if bias is None else bias, y if best is None else best
    if tile.is_persistent:
        box = (tile.tokens, tile.outputs // tile.parts() // (2 if activation == "swiglu" else 1))
        _persistent[(min(gpu_of(x.device).multiprocessors, token_tiles * output_tiles),)](
            Block(x, (tile.tokens, tile.inner)), Block(weight, (tile.outputs, tile.inner)), weight, bias,
            y if residual is None else Block(residual, box), best,
            y if activation == "argmax" else Block(y, box), *sizes, weight.stride(0),
            GROUP=tile.group, PARTS=tile.parts(), **how,
        )  # fmt: skip
    else:
        y_len = 0 if activation == "argmax" else y.stride(0)
        lens = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y_len)
        _tiles[token_tiles, output_tiles](
            x, weight, bias, y if residual is None else residual, best, y, *sizes, *lens,
            WHOLE=num_inputs % tile.inner == 0, **how,
        )  # fmt: skip


def _launch_gluon(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str,
    tile: Tile,
) -> None:
    num_tiles = cdiv(x.shape[0], tile.tokens) * cdiv(weight.shape[0], tile.outputs)
    box = (PART, SLAB // 2 if activation == "swiglu" else SLAB)
    parts = tile.tokens // PART if residual is not None else 1
    room = SHARED[90] - BARRIERS - tile.consumers * parts * box[0] * box[1] * 2
    stages = room // ((tile.outputs + tile.tokens) * tile.inner * 2)
    least = {"maxnreg": 128} if tile.consumers == 1 else {}  # else 256, which no thread may have
    _dense[(min(gpu_of(x.device).multiprocessors, num_tiles),)](
        Block(x, (tile.tokens, tile.inner)), Block(weight, (SLAB, tile.inner)), y if bias is None else bias,
        y if residual is None else Block(residual, box), Block(y, box), x.shape[0], *weight.shape,
        CONSUMERS=tile.consumers, STAGES=min(tile.stages, stages), GROUP=tile.group,
        REGISTERS=REGISTERS[tile.consumers], ACTIVATION=activation, BIASED=bias is not None,
        ADDS=residual is not None, num_warps=tile.warps, enable_fp_fusion=False, **least,
    )  # fmt: skip


def _early(weight: torch.Tensor) -> int:
    """Bytes of every line that are fetched while the kernel before still runs (benchmarks/gpu_overlap.md)."""
    return EARLY if EARLY <= weight.shape[1] * weight.element_size() < LONG else 0
