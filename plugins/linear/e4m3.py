"""The dense layer on CUDA with inputs and weights in e4m3 (plugins/inputs.py): two launches, the first of
which rounds the inputs."""

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Any

import torch

from hemiola.plugins.gpu.checks import absent, check, is_described
from hemiola.plugins.gpu.device import SHARED, gpu_of
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Block, Kernel, cdiv, pow2
from hemiola.plugins.gpu.lines import CodeLines, sections
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile, steps_tile_of, table_of
from hemiola.plugins.groups import E4M3, Layout
from hemiola.plugins.inputs import SPAN
from hemiola.plugins.linear.cuda import BARRIERS, PART, REGISTERS, SLAB
from hemiola.plugins.linear.packed import ended

_round = Kernel("linear", "_round")
_e4m3 = Kernel("linear", "_e4m3")
_dense_e4m3 = Kernel("linear", "_dense_e4m3")  # Gluon's

BLOCK = 2048  # inputs that are rounded together
LEAST = 32  # scales of a place in shared memory (gluon_e4m3.py)
# By tokens at most, where Gluon's kernel may not; no one measured them.
TILES = ((16, Tile(64, 16, 128, 4, 3, True)), (64, Tile(64, 64, 128, 4, 3, True)))
MANY = Tile(128, 128, 128, 8, 2, True)


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # pack_lines([O, F])
    bias: torch.Tensor,  # [O], or zero-length: none
    num_outputs: int,  # O
    weight_layout: Layout,
    residual: torch.Tensor | None = None,  # [T, O]
    ending: str = "",
    tile: Tile | None = None,
) -> Any:  # [T, O], or what it ends as
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    if ending == "argmax":
        tile = tile or tile_for(x.shape[0])
    launch = partial(_launch, x, weight, bias, residual, num_outputs, weight_layout, tile)
    return ended(x, num_outputs, residual, ending, tile.outputs if tile else 0, launch)


def tile_for(num_tokens: int) -> Tile:
    return next((tile for limit, tile in TILES if num_tokens <= limit), MANY)


def every_tile(largest: Size, x: torch.Tensor, is_stored: bool = True) -> Iterator[Variant]:
    """Every tile that may be chosen; those of Gluon give way where they may not."""
    tiles = [tile for _, tile in TILES] + [MANY]
    gluons = [many.tile for many in table_of(gpu_of(x.device).capability).steps if is_stored]
    for tile in tiles + (gluons if x.dtype is torch.bfloat16 else []):
        yield Variant(largest, {"tile": tile})


def variants(
    largest: Size,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_outputs: int,
    residual: torch.Tensor | None = None,
    ending: str = "",
) -> Iterator[Variant]:
    yield from every_tile(largest, x, is_stored=ending != "argmax")


def buffers(
    x: torch.Tensor, num_rows: int, lines: CodeLines, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """For codes [R, width] and their scales [G, R]."""
    num_scales = lines.width // SPAN if layout.inputs == "group" else 1
    codes = torch.empty(num_rows, lines.width, dtype=E4M3, device=x.device)
    by = torch.empty(num_scales, cdiv(num_rows, 4) * 4, dtype=torch.float32, device=x.device)
    return codes, by[:, :num_rows]


def block_of(lines: CodeLines) -> int:
    """Inputs that a program rounds together."""
    return min(BLOCK, pow2(lines.width))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    num_outputs: int,
    layout: Layout,
    tile: Tile | None,
    y: torch.Tensor,
    best: torch.Tensor | None,  # with argmax: the outputs whose values y holds
    activation: str,
) -> None:
    check("linear", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    if not absent(bias):
        check("linear", "bias", bias, (num_outputs,), FLOATS, x.device, anywhere=True)
    num_tokens, num_inputs = x.shape
    may = _in_gluon(y, activation, residual)
    if tile is None and may:
        tile = steps_tile_of(num_tokens, num_outputs, gpu_of(x.device))
    tile = tile or tile_for(num_tokens)
    if tile.consumers and not may:
        tile = tile_for(num_tokens)
    lines = sections(weight, layout, num_outputs, num_inputs)
    codes, by = buffers(x, num_tokens, lines, layout)
    _round[(num_tokens,)](
        x, lines.static, codes, by, num_inputs, lines.width, by.stride(0), x.stride(0), BY=layout.inputs,
        BLOCK=block_of(lines), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if tile.consumers:
        _launch_gluon(codes, by, lines, num_outputs, bias, residual, y, activation, layout, tile)
        return
    _e4m3[cdiv(num_tokens, tile.tokens), cdiv(num_outputs, tile.outputs)](
        codes, by, lines.codes, lines.scales, y if absent(bias) else bias,
        y if residual is None else residual, y if best is None else best, y, num_tokens, num_outputs,
        lines.width, lines.span,
        0 if residual is None else residual.stride(0), 0 if activation == "argmax" else y.stride(0),
        BY_GROUP=layout.inputs == "group", DTYPE=x.dtype, TOKENS=tile.tokens, OUTPUTS=tile.outputs,
        ACTIVATION=activation, BIASED=not absent(bias), ADDS=residual is not None, num_warps=tile.warps,
        num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _in_gluon(y: torch.Tensor, activation: str, residual: torch.Tensor | None) -> bool:
    """Whether Gluon's kernel may write such lines. Nothing interprets it on a CPU."""
    may = activation != "argmax" and y.dtype is torch.bfloat16 and y.device.type != "cpu"
    return may and is_described(y) and (residual is None or is_described(residual))


def _launch_gluon(
    codes: torch.Tensor,  # [T, width]
    by: torch.Tensor,
    lines: CodeLines,
    num_outputs: int,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str,
    layout: Layout,
    tile: Tile,
) -> None:
    """Gluon's kernel."""
    (num_tokens, width), spans = codes.shape, cdiv(lines.width, lines.span)
    weight = lines.codes[: num_outputs * width].view(num_outputs, width)
    scales = lines.scales[: spans * num_outputs].view(spans, num_outputs)
    span, part = layout.span // SPAN, min(PART, tile.tokens)
    abreast = gcd(tile.abreast, width // SPAN, span if span > 1 else 0)
    box = (part, SLAB // 2 if activation == "swiglu" else SLAB)
    parts = tile.tokens // part if residual is not None else 1
    a_step = (tile.outputs + tile.tokens) * SPAN
    its_scales = (tile.outputs + max(tile.tokens, LEAST)) * 4
    room = SHARED[90] - BARRIERS - tile.consumers * parts * box[0] * box[1] * 2 - abreast * its_scales
    stages = min(tile.stages * tile.abreast // abreast, room // (abreast * (a_step + its_scales)))
    num_tiles = cdiv(num_tokens, tile.tokens) * cdiv(num_outputs, tile.outputs)
    least = {"maxnreg": 128} if tile.consumers == 1 else {}  # else 256, which no thread may have
    _dense_e4m3[(min(gpu_of(codes.device).multiprocessors, num_tiles),)](
        Block(codes, (tile.tokens, SPAN)), Block(by, (abreast, tile.tokens)), Block(weight, (SLAB, SPAN)),
        Block(scales, (abreast, SLAB)), y if absent(bias) else bias,
        y if residual is None else Block(residual, box), Block(y, box), num_tokens, num_outputs,
        width // SPAN, BY="step" if layout.inputs == "group" else "token", SPAN=span,
        ABREAST=abreast, CONSUMERS=tile.consumers, STAGES=stages, GROUP=tile.group,
        REGISTERS=REGISTERS[tile.consumers], ACTIVATION=activation, BIASED=not absent(bias),
        ADDS=residual is not None, num_warps=4, enable_fp_fusion=False, **least,
    )  # fmt: skip
