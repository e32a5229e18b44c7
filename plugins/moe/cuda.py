"""A mixture of experts on CUDA: pairs of token and expert in groups, a chain per output, slots in order.

Pairs are sorted by expert on the device, and every group is cut into tiles; programs for tiles that are not
needed end at once, so that nothing waits for a count. In which tile a pair lies never changes its bits.
"""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.checks import check, is_described
from hemiola.plugins.gpu.device import Gpu, gpu_of
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Block, Kernel, cdiv, pow2
from hemiola.plugins.gpu.sizes import Size, Variant, around, powers
from hemiola.plugins.gpu.tiles import FALLBACK, Tile, crowds, expert_tile_of, table_of
from hemiola.plugins.moe.spec import ACTIVATIONS

_combine = Kernel("moe", "_combine")
_sort = Kernel("moe", "_sort")
_count, _place = Kernel("moe", "_count"), Kernel("moe", "_place")
_experts_persistent = Kernel("moe", "_experts_persistent")
_experts = Kernel("moe", "_experts")
_copy_lines = Kernel("moe", "_copy_lines")

SORT_BLOCK = 2048  # pairs that a program of the sort looks at together; more are divided by _count and _place
DIVIDED, COMPARED = 512, 8192  # pairs of their programs, and numbers that one of them compares together


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K] fp32
    up: torch.Tensor,  # [E, J, F], J = I, or 2I with swiglu: all gates, then all values
    down: torch.Tensor,  # [E, F, I]
    activation: str,
    tile: Tile | None = None,
) -> torch.Tensor:  # [T, F]
    """See reference.py; an expert's result is rounded to x's dtype. An id that is no expert adds nothing."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"moe: activation is {activation!r}, expected relu2 or swiglu")
    check("moe", "x", x, (None, None), FLOATS, x.device, apart=1, anywhere=True)
    (num_tokens, width), num_experts, inner = x.shape, up.shape[0], down.shape[-1]
    check("moe", "expert_ids", expert_ids, (num_tokens, None), torch.int32, x.device)
    num_slots = expert_ids.shape[1]
    shape, outputs = (num_tokens, num_slots), inner * ACTIVATIONS[activation]
    check("moe", "expert_weights", expert_weights, shape, torch.float32, x.device, anywhere=True)
    check("moe", "up", up, (None, outputs, width), x.dtype, x.device, anywhere=True)
    check("moe", "down", down, (num_experts, width, inner), x.dtype, x.device, anywhere=True)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    num_pairs = num_tokens * num_slots
    tile = tile or _tile_of(num_pairs, up, down)
    pairs, tiles = sort_pairs(expert_ids, num_experts, tile.tokens)
    hidden = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _multiply(x, up, hidden, pairs, tiles, expert_weights, activation, tile)
    _multiply(hidden, down, out, pairs, tiles, expert_weights, "none", tile)
    combine(out, expert_ids, y, num_experts)
    return y


def variants(
    largest: Size,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    *rest: torch.Tensor | str,
) -> Iterator[Variant]:
    """Tiles go by pairs per expert, the sort's blocks by pairs."""
    num_slots = expert_ids.shape[1]
    borders = [pairs * len(up) for pairs in crowds(gpu_of(x.device))] + powers(SORT_BLOCK)
    for tokens in around((pairs / num_slots for pairs in borders), largest.tokens):
        yield Variant(largest._replace(tokens=tokens))


def ahead(gpu: Gpu, *arguments: torch.Tensor | str) -> Iterator[dict[str, Tile]]:
    """The highest tile that needs no descriptors, for steps of any size."""
    tiles = [crowd.tile for crowd in table_of(gpu.capability).experts if not crowd.tile.is_persistent]
    yield {"tile": max(tiles, key=lambda tile: tile.tokens)}


def _tile_of(num_pairs: int, up: torch.Tensor, down: torch.Tensor) -> Tile:
    if up.dtype is torch.float32:
        return FALLBACK
    described = is_described(up[0]) and is_described(down[0])
    return expert_tile_of(num_pairs, len(up), gpu_of(up.device), described)


def combine(out: torch.Tensor, expert_ids: torch.Tensor, y: torch.Tensor, num_experts: int) -> None:
    """Adds experts' results, weighed, in the order of tokens and slots."""
    num_tokens, width = y.shape
    block = min(1024, pow2(width))
    _combine[num_tokens, cdiv(width, block)](
        out, expert_ids, y, width, num_experts,
        SLOTS=expert_ids.shape[1], BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def sort_pairs(expert_ids: torch.Tensor, num_experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs [P] by expert, and tiles [M + 1, 4] of up to `tokens`: expert or -1, first place, end, unused.

    The last line says how many tiles have an expert.
    """
    num_pairs = expert_ids.numel()
    num_tiles = min(num_experts, num_pairs) + num_pairs // tokens
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    tiles = torch.empty(num_tiles + 1, 4, dtype=torch.int32, device=expert_ids.device)
    sizes = {"EXPERTS": num_experts, "BINS": max(32, pow2(num_experts))}
    if num_pairs > SORT_BLOCK:
        num_blocks = cdiv(num_pairs, DIVIDED)
        counts = torch.empty(num_blocks, sizes["BINS"], dtype=torch.int32, device=expert_ids.device)
        _count[(num_blocks,)](expert_ids, counts, num_pairs, **sizes, BLOCK=DIVIDED, num_warps=4)
        _place[(num_blocks,)](
            expert_ids, counts, pairs, tiles, num_pairs, num_tiles, **sizes, TOKENS=tokens, BLOCK=DIVIDED,
            EACH=min(32, max(1, COMPARED // sizes["BINS"])), num_warps=8,
        )  # fmt: skip
        return pairs, tiles
    block = max(32, pow2(num_pairs))
    _sort[(num_experts,)](
        expert_ids, pairs, tiles, num_pairs, num_tiles, **sizes, TOKENS=tokens, BLOCK=block, num_warps=4
    )  # fmt: skip
    return pairs, tiles


def _multiply(
    x: torch.Tensor,  # [T, F], or hidden [P, I] in the order of pairs
    weight: torch.Tensor,  # [E, O, F]
    y: torch.Tensor,  # hidden [P, I], or [P, F] in the order of tokens and slots
    pairs: torch.Tensor,
    tiles: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
    tile: Tile,
) -> None:
    """One of an expert's two layers: up (with an activation) gathers tokens, down scatters what it weighs."""
    _, num_outputs, num_inputs = weight.shape
    sizes, is_up = (num_outputs, num_inputs), activation != "none"
    how = {"SLOTS": expert_weights.shape[1], "IS_UP": is_up, "DTYPE": x.dtype, "TOKENS": tile.tokens,
           "OUTPUTS": tile.outputs, "INNER": tile.inner, "ACTIVATION": activation, "num_warps": tile.warps,
           "num_stages": tile.stages, "enable_fp_fusion": False}  # fmt: skip
    num_tiles, output_tiles = tiles.shape[0] - 1, cdiv(num_outputs, tile.outputs)
    if tile.is_persistent:
        halves = 2 if activation == "swiglu" else 1
        box = (halves, tile.outputs // halves, tile.inner)
        lines = _gather(x, pairs, expert_weights.shape[1]) if is_up else x
        _experts_persistent[(min(gpu_of(x.device).multiprocessors, num_tiles * output_tiles),)](
            Block(lines, (tile.tokens, tile.inner)),
            Block(weight.view(-1, num_outputs // halves, num_inputs), box),
            y, pairs, tiles, expert_weights, *sizes, num_tiles, y.stride(0),
            GROUP=tile.group, HALVES=halves, **how,
        )  # fmt: skip
    else:
        _experts[num_tiles, output_tiles](
            x, weight, y, pairs, tiles, expert_weights, *sizes, x.stride(0), y.stride(0),
            WHOLE=num_inputs % tile.inner == 0, WEIGHT_FIRST=tile.weight_first, **how,
        )  # fmt: skip


def _gather(x: torch.Tensor, pairs: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Lines of x in the order of pairs, [P, F]."""
    num_pairs, (num_tokens, width) = pairs.shape[0], x.shape
    lines = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    block = min(2048, pow2(width))
    _copy_lines[num_pairs, cdiv(width, block)](
        x, pairs, lines, num_tokens, width, x.stride(0), SLOTS=num_slots, BLOCK=block, num_warps=4
    )
    return lines
