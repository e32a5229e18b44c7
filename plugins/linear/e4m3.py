"""The dense layer on CUDA with inputs and weights in e4m3 (plugins/inputs.py): two launches, the first of
which rounds the inputs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hemiola.plugins.gpu.checks import absent, check, is_described
from hemiola.plugins.gpu.device import gpu_of
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2
from hemiola.plugins.gpu.lines import CodeLines, sections
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile, steps_tile_of, table_of
from hemiola.plugins.groups import E4M3, Layout
from hemiola.plugins.inputs import SPAN
from hemiola.plugins.linear.coded import launch_steps
from hemiola.plugins.linear.packed import ended

_round = Kernel("linear", "_round")
_e4m3 = Kernel("linear", "_e4m3")

BLOCK = 2048  # inputs that are rounded together
# By tokens at most; no one measured them.
TILES = ((16, Tile(64, 16, 128, 4, 3, True)), (64, Tile(64, 64, 128, 4, 3, True)))
WIDE = 8192  # outputs that keep a GPU busy with tiles for one token
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
    return codes, torch.empty(num_scales, num_rows, dtype=torch.float32, device=x.device)


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
    if tile is None and may and (num_tokens > TILES[0][0] or num_outputs < WIDE):
        tile = steps_tile_of(num_tokens, num_outputs, gpu_of(x.device))
    tile = tile or tile_for(num_tokens)
    if tile.consumers and not may:
        tile = tile_for(num_tokens)
    lines = sections(weight, layout, num_outputs, num_inputs)
    codes, by = buffers(x, num_tokens, lines, layout)
    _round[(num_tokens,)](
        x, lines.static, codes, by, num_inputs, lines.width, num_tokens, x.stride(0), BY=layout.inputs,
        BLOCK=block_of(lines), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if tile.consumers:
        whole = lines.codes[: num_outputs * lines.width].view(num_outputs, lines.width)
        launch_steps(
            codes, by, whole, lines.scales, lines.scales, bias, residual, y, activation, tile, SPAN,
            KIND="e4m3", SCALED=True, DIVIDES=False, BY="step" if layout.inputs == "group" else "token",
            SPAN=layout.span // SPAN,
        )  # fmt: skip
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
