"""A mixture of experts on CUDA with quantised weights: pairs as in cuda.py, chains of plugins/gpu/codes."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.device import gpu_of
from hemiola.plugins.gpu.launch import Kernel, cdiv
from hemiola.plugins.gpu.sizes import Size, Variant, around, powers
from hemiola.plugins.gpu.tiles import Tile, coded_expert_tile_of, table_of
from hemiola.plugins.gpu.words import form_of, sections
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.coded import WIDE, turn_of
from hemiola.plugins.moe.cuda import SORT_BLOCK
from hemiola.plugins.moe.packed import Chosen, of_experts

_coded_experts = Kernel("moe", "_coded_experts")


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K] fp32
    up: torch.Tensor,  # pack_words([E, J, F]), J = I, or 2I with swiglu: all gates, then all values
    down: torch.Tensor,  # pack_words([E, F, I])
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
        lambda num_pairs: tile or _tile_of(x, num_pairs, len(up), up_layout), _multiply,
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
    crowds = table_of(gpu_of(x.device).capability).coded_experts
    borders = [crowd.max_pairs * len(up) for crowd in crowds[:-1]] + powers(SORT_BLOCK)
    for tokens in around((pairs / expert_ids.shape[1] for pairs in borders), largest.tokens):
        yield Variant(largest._replace(tokens=tokens))


def _tile_of(x: torch.Tensor, num_pairs: int, num_experts: int, layout: Layout) -> Tile:
    if x.dtype is torch.float32:
        return WIDE
    return coded_expert_tile_of(num_pairs, num_experts, form_of(layout).bits, gpu_of(x.device))


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
    num_inputs = x.shape[1]
    words, scales, zeros, factors, form = sections(weight, layout, num_outputs, num_inputs)
    turn = turn_of(tile, form, num_inputs)
    # where a chain has fewer steps side by side, a program has so many more chains
    outputs = tile.outputs * tile.abreast // turn["BLOCKS"] if turn["ABREAST"] else tile.outputs
    _coded_experts[chosen.tiles.shape[0] - 1, cdiv(num_outputs, outputs)](
        x, words, scales, zeros, factors, y, chosen.pairs, chosen.tiles, chosen.weights, num_outputs,
        num_inputs, *(part.stride(0) for part in (words, scales, zeros, factors)), x.stride(0),
        y.stride(0), **form.constants(), **turn, WHOLE=num_inputs % (turn["BLOCKS"] * form.block) == 0,
        SLOTS=chosen.weights.shape[1], IS_UP=activation != "none", DTYPE=x.dtype, TOKENS=tile.tokens,
        OUTPUTS=outputs, ACTIVATION=activation, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
