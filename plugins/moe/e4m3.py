"""A mixture of experts on CUDA with inputs and weights in e4m3: pairs as in cuda.py, chains as in
plugins/linear/e4m3.py."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv
from hemiola.plugins.gpu.lines import sections
from hemiola.plugins.gpu.sizes import Size, Variant, around, powers
from hemiola.plugins.gpu.tiles import Tile
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.e4m3 import block_of, buffers
from hemiola.plugins.moe.cuda import SORT_BLOCK
from hemiola.plugins.moe.packed import Chosen, of_experts

_e4m3_experts = Kernel("moe", "_e4m3_experts")
_round_pairs = Kernel("moe", "_round_pairs")

FEW_PAIRS = 16  # of an expert, on average
# 1.57 of bf16's speed at 1.5 pairs (H200, experts of 256), 0.78 at 137, where tiles of 128 pairs have 0.53
FEW, MANY = Tile(64, 16, 128, 4, 3, True), Tile(128, 64, 128, 4, 3, True)


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K] fp32
    up: torch.Tensor,  # pack_lines([E, J, F]), J = I, or 2I with swiglu: all gates, then all values
    down: torch.Tensor,  # pack_lines([E, F, I])
    activation: str,
    inner: int,  # I
    up_layout: Layout,
    down_layout: Layout,
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, F]
    """See reference.py; an expert's result is rounded to x's dtype. An id that is no expert adds nothing."""
    layouts = up_layout, down_layout
    return of_experts(
        x, expert_ids, expert_weights, up, down, activation, inner, layouts,
        lambda num_pairs: tile or (FEW if num_pairs <= FEW_PAIRS * len(up) else MANY), _multiply,
    )  # fmt: skip


def variants(
    largest: Size,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    *rest: torch.Tensor | str | int,
) -> Iterator[Variant]:
    """Tiles go by pairs per expert, the sort's blocks by pairs."""
    borders = [FEW_PAIRS * len(up), *powers(SORT_BLOCK)]
    for tokens in around((pairs / expert_ids.shape[1] for pairs in borders), largest.tokens):
        yield Variant(largest._replace(tokens=tokens))


def _multiply(
    x: torch.Tensor,  # [T, F], or hidden [P, I] in the order of pairs
    weight: torch.Tensor,
    layout: Layout,
    num_outputs: int,
    y: torch.Tensor,  # hidden [P, I], or [P, F] in the order of tokens and slots
    chosen: Chosen,
    activation: str,
    tile: Tile,
) -> None:
    num_inputs, num_pairs, is_up = x.shape[1], len(chosen.pairs), activation != "none"
    lines, slots = sections(weight, layout, num_outputs, num_inputs), chosen.ids.shape[1]
    codes, by = buffers(x, num_pairs, lines, layout)
    _round_pairs[(num_pairs,)](
        x, lines.static, lines.static.stride(0), chosen.ids, chosen.pairs, codes, by, num_inputs, lines.width,
        x.stride(0), num_pairs, len(weight), SLOTS=slots, IS_UP=is_up, BY=layout.inputs,
        BLOCK=block_of(lines), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _e4m3_experts[chosen.tiles.shape[0] - 1, cdiv(num_outputs, tile.outputs)](
        codes, by, lines.codes, lines.scales, y, chosen.pairs, chosen.tiles, chosen.weights, num_outputs,
        lines.width, lines.span, num_pairs, lines.codes.stride(0), lines.scales.stride(0), y.stride(0),
        BY_GROUP=layout.inputs == "group", SLOTS=slots, IS_UP=is_up, DTYPE=x.dtype, TOKENS=tile.tokens,
        OUTPUTS=tile.outputs, ACTIVATION=activation, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
