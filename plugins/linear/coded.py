"""The dense layer on CUDA with a quantised weight: codes are widened in registers (plugins/gpu/codes.py; on
sm_90 gluon_few.py, too), and for many tokens once, into memory (gluon_steps.py)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hemiola.plugins.gpu.checks import absent, check, is_described
from hemiola.plugins.gpu.device import SHARED, gpu_of
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Block, Kernel, cdiv
from hemiola.plugins.gpu.sizes import Size, Variant
from hemiola.plugins.gpu.tiles import Tile, coded_tile_of, coded_tiles
from hemiola.plugins.gpu.words import SLAB, Coding, Words, form_of, sections
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.cuda import BARRIERS, EARLY, LONG, PART, REGISTERS
from hemiola.plugins.linear.cuda import SLAB as CONSUMED
from hemiola.plugins.linear.packed import ended

_coded = Kernel("linear", "_coded")
_coded_few = Kernel("linear", "_coded_few")  # Gluon's
_dense_steps = Kernel("linear", "_dense_steps")  # Gluon's
_unpack = Kernel("linear", "_unpack")

WIDE = Tile(64, 64, 32, 4, 2, True)  # fp32
UNIT = 64  # inputs of a stage of Gluon's, at most
UNPACKED = 1024  # inputs that are widened together
LARGEST = 1 << 28  # numbers that are widened into memory: 512 MiB of bf16


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # pack_words([O, F])
    bias: torch.Tensor,  # [O], or zero-length: none
    num_outputs: int,  # O
    weight_layout: Layout,
    residual: torch.Tensor | None = None,  # [T, O]
    ending: str = "",
    tile: Tile | None = None,
) -> Any:  # [T, O], or what it ends as
    """See reference.py. A row's bits do not depend on T, its place or other rows."""
    check("linear", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    is_stored, form = ending != "argmax", form_of(weight_layout)
    if tile is None or not may_serve(x, num_outputs, form, is_stored, residual)(tile):
        tile = tile_for(x, num_outputs, form, is_stored, residual)
    launch = partial(_launch, x, weight, bias, residual, num_outputs, weight_layout, tile)
    return ended(x, num_outputs, residual, ending, _part(tile), launch)


def _part(tile: Tile) -> int:
    """Outputs of whose the best one is stored."""
    return SLAB if tile.direct else tile.outputs


def tile_for(
    x: torch.Tensor,
    num_outputs: int,
    form: Coding,
    is_stored: bool = True,
    residual: torch.Tensor | None = None,
) -> Tile:
    if x.dtype is torch.float32:
        return WIDE
    may = may_serve(x, num_outputs, form, is_stored, residual)
    return coded_tile_of(x.shape[0], num_outputs, form.bits, gpu_of(x.device), may)


def may_serve(
    x: torch.Tensor, num_outputs: int, form: Coding, is_stored: bool, residual: torch.Tensor | None
) -> Callable[[Tile], bool]:
    """Whether a layer may be computed in a tile; gluon_few.py takes a step in a block."""
    in_gluon = _in_gluon(x, num_outputs, residual)
    fits = is_stored and form.step >= 32 and num_outputs * x.shape[1] <= LARGEST

    def may(tile: Tile) -> bool:
        if tile.direct:
            return in_gluon and form.spans == 1 and (form.bits == 4 or not form.has_zeros)
        return not tile.consumers or (in_gluon and fits)

    return may


def every_tile(largest: Size, x: torch.Tensor, num_outputs: int, is_stored: bool = True) -> Iterator[Variant]:
    """Every tile that may be chosen; how many tokens there are tells a kernel nothing."""
    if x.dtype is torch.float32:
        tiles = {WIDE}
    else:
        tiles = coded_tiles(num_outputs, gpu_of(x.device), _in_gluon(x, num_outputs), is_stored)
    for tile in tiles:
        yield Variant(largest, {"tile": tile})


def _in_gluon(x: torch.Tensor, num_outputs: int, residual: torch.Tensor | None = None) -> bool:
    """Whether Gluon's kernel may read and write such lines. Nothing interprets it on a CPU."""
    lines = num_outputs % 16 == 0 and is_described(x) and (residual is None or is_described(residual))
    return lines and x.dtype is torch.bfloat16 and x.device.type != "cpu"


def variants(
    largest: Size,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_outputs: int,
    residual: torch.Tensor | None = None,
    ending: str = "",
) -> Iterator[Variant]:
    yield from every_tile(largest, x, num_outputs, is_stored=ending != "argmax")


def early(form: Coding, num_inputs: int) -> int:
    """Bytes of every slab that are fetched while the kernel before still runs: those of lines of bf16."""
    slab = cdiv(num_inputs, form.block) * form.half * SLAB * 2
    return EARLY * SLAB if EARLY * SLAB <= slab < LONG * SLAB else 0


def turn_of(tile: Tile, form: Coding, num_inputs: int) -> dict[str, int | bool]:
    """Blocks of a turn of a kernel's loop, and whether warps take them side by side: two, where there are no
    more."""
    abreast = tile.abreast > 0 and form.spans == 1
    blocks = tile.abreast if abreast else max(1, tile.inner // form.block)
    return {"BLOCKS": 2 if abreast and num_inputs <= 2 * form.block else blocks, "ABREAST": abreast}


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    num_outputs: int,
    layout: Layout,
    tile: Tile,
    y: torch.Tensor,
    best: torch.Tensor | None,  # with argmax: the outputs whose values y holds
    activation: str,
) -> None:
    if not absent(bias):
        check("linear", "bias", bias, (num_outputs,), FLOATS, x.device, anywhere=True)
    num_tokens, num_inputs = x.shape
    packed = sections(weight, layout, num_outputs, num_inputs)
    words, scales, zeros, factors, form = packed
    if tile.direct:
        _launch_few(x, packed, bias, residual, y, best, activation, num_outputs, tile)
        return
    if tile.consumers:
        _launch_steps(
            x, unpacked(packed, num_outputs, num_inputs), packed, bias, residual, y, activation, tile
        )
        return
    turn = turn_of(tile, form, num_inputs)
    _coded[cdiv(num_tokens, tile.tokens), cdiv(num_outputs, tile.outputs)](
        x, words, scales, zeros, factors, y if absent(bias) else bias, y if residual is None else residual,
        y if best is None else best, y, num_tokens, num_outputs, num_inputs, x.stride(0),
        0 if residual is None else residual.stride(0), 0 if activation == "argmax" else y.stride(0),
        **form.constants(), **turn, WHOLE=num_inputs % (turn["BLOCKS"] * form.block) == 0, DTYPE=x.dtype,
        TOKENS=tile.tokens, OUTPUTS=tile.outputs, ACTIVATION=activation, BIASED=not absent(bias),
        ADDS=residual is not None, EARLY=early(form, num_inputs), num_warps=tile.warps,
        num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_few(
    x: torch.Tensor,
    packed: Words,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    best: torch.Tensor | None,
    activation: str,
    num_outputs: int,
    tile: Tile,
) -> None:
    """Gluon's kernel for few tokens."""
    (num_tokens, num_inputs), form = x.shape, packed.form
    more = {"maxnreg": 128} if form.kind == "e2m1" else {}  # fewer would be spent, and inputs asked for late
    programs = min(gpu_of(x.device).multiprocessors * tile.group, cdiv(num_outputs, tile.outputs))
    _coded_few[cdiv(num_tokens, tile.tokens), programs](
        x, packed.words, packed.scales, packed.zeros, packed.factors, y if absent(bias) else bias,
        y if residual is None else residual, y if best is None else best, y, num_tokens, num_outputs,
        num_inputs, x.stride(0), 0 if residual is None else residual.stride(0),
        0 if activation == "argmax" else y.stride(0), KIND=form.kind, HALF=form.half, PARTS=16 // form.bits,
        SCALED=form.is_scaled, ZEROS=form.has_zeros, DIVIDES=form.divides,
        WHOLE=num_inputs % form.block == 0, SLABS=tile.outputs // SLAB,
        AHEAD=tile.stages, WARPS=tile.warps, ACTIVATION=activation,
        BIASED=not absent(bias), ADDS=residual is not None, num_warps=tile.warps, enable_fp_fusion=False,
        **more,
    )  # fmt: skip


def unpacked(packed: Words, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """The bf16 numbers that are multiplied with inputs, [O, inputs of whole blocks]."""
    words, scales, zeros, _, form = packed
    num_blocks = cdiv(num_inputs, form.block)
    weight = torch.empty(num_outputs, num_blocks * form.block, dtype=torch.bfloat16, device=words.device)
    _unpack[cdiv(num_outputs, SLAB), cdiv(num_blocks * form.block, UNPACKED)](
        words, scales, zeros, weight, num_outputs, num_blocks, KIND=form.kind, HALF=form.half, STEP=form.step,
        SCALED=form.is_scaled, ZEROS=form.has_zeros, BLOCKS=UNPACKED // form.block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return weight


def _launch_steps(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, whole blocks]
    packed: Words,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: str,
    tile: Tile,
) -> None:
    """Gluon's kernel."""
    (num_tokens, _), (num_outputs, width), form = x.shape, weight.shape, packed.form
    unit, box = min(UNIT, form.step), (PART, CONSUMED // 2 if activation == "swiglu" else CONSUMED)
    parts = tile.tokens // PART if residual is not None else 1
    room = SHARED[90] - BARRIERS - tile.consumers * parts * box[0] * box[1] * 2
    stages = room // ((tile.outputs + tile.tokens) * unit * 2)
    num_tiles = cdiv(num_tokens, tile.tokens) * cdiv(num_outputs, tile.outputs)
    _dense_steps[(min(gpu_of(x.device).multiprocessors, num_tiles),)](
        Block(x, (tile.tokens, unit)), Block(weight, (CONSUMED, unit)), packed.scales, packed.factors,
        y if absent(bias) else bias, y if residual is None else Block(residual, box), Block(y, box),
        num_tokens, num_outputs, width // form.step, STEP=form.step, KIND=form.kind, SCALED=form.is_scaled,
        DIVIDES=form.divides, CONSUMERS=tile.consumers, STAGES=min(tile.stages, stages), GROUP=tile.group,
        REGISTERS=REGISTERS[tile.consumers], ACTIVATION=activation, BIASED=not absent(bias),
        ADDS=residual is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
