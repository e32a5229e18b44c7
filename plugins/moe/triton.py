"""A mixture of experts on CUDA: pairs of token and expert in groups, a chain per output, slots in order.

Pairs are sorted by expert on the device, and every group is cut into tiles; programs for tiles that are not
needed end at once, so that nothing waits for a count. In which tile a pair lies never changes its bits.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu.checks import check, is_described
from hemiola.plugins.gpu.dense import activate, chain, place_of, row_of
from hemiola.plugins.gpu.device import gpu_of
from hemiola.plugins.gpu.dtypes import DTYPES, FLOATS
from hemiola.plugins.gpu.tiles import FALLBACK, Tile, expert_tile_of

ACTIVATIONS = ("relu2", "swiglu")
SORT_BLOCK = 2048  # pairs that a program of the sort looks at together


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
    check("moe", "x", x, (None, None), FLOATS, x.device)
    (num_tokens, width), num_experts, inner = x.shape, up.shape[0], down.shape[-1]
    check("moe", "expert_ids", expert_ids, (num_tokens, None), (torch.int32,), x.device)
    num_slots = expert_ids.shape[1]
    check("moe", "expert_weights", expert_weights, (num_tokens, num_slots), (torch.float32,), x.device)
    check(
        "moe", "up", up, (None, 2 * inner if activation == "swiglu" else inner, width), (x.dtype,), x.device
    )
    check("moe", "down", down, (num_experts, width, inner), (x.dtype,), x.device)
    whole = {"expert_ids": expert_ids, "expert_weights": expert_weights, "up": up, "down": down}
    for name, tensor in whole.items():
        if not tensor.is_contiguous():
            raise ValueError(f"moe: {name} has the strides {tensor.stride()}, expected a contiguous tensor")
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    num_pairs = num_tokens * num_slots
    tile = tile or _tile_of(num_pairs, up, down)
    pairs, tiles = _sort_pairs(expert_ids, num_experts, tile.tokens)
    hidden = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _multiply(x, up, hidden, pairs, tiles, expert_weights, activation, tile)
    _multiply(hidden, down, out, pairs, tiles, expert_weights, "none", tile)
    block = min(1024, triton.next_power_of_2(width))
    _combine[num_tokens, triton.cdiv(width, block)](
        out,
        expert_ids,
        y,
        width,
        num_experts,
        SLOTS=num_slots,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


def _tile_of(num_pairs: int, up: torch.Tensor, down: torch.Tensor) -> Tile:
    if up.dtype is torch.float32:
        return FALLBACK
    described = is_described(up[0]) and is_described(down[0])
    return expert_tile_of(num_pairs, len(up), gpu_of(up.device), described)


def _sort_pairs(expert_ids: torch.Tensor, num_experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs [P] by expert, and tiles [M + 1, 4] of up to `tokens`: expert or -1, first place, end, unused.

    The last line says how many tiles have an expert.
    """
    num_pairs = expert_ids.numel()
    num_tiles = min(num_experts, num_pairs) + num_pairs // tokens
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    tiles = torch.empty(num_tiles + 1, 4, dtype=torch.int32, device=expert_ids.device)
    block = min(SORT_BLOCK, max(32, triton.next_power_of_2(num_pairs)))
    _sort[(num_experts,)](
        expert_ids, pairs, tiles, num_pairs, num_tiles, EXPERTS=num_experts,
        BINS=max(32, triton.next_power_of_2(num_experts)), TOKENS=tokens, BLOCK=block, num_warps=4,
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
    how = {"SLOTS": expert_weights.shape[1], "IS_UP": is_up, "DTYPE": DTYPES[x.dtype], "TOKENS": tile.tokens,
           "OUTPUTS": tile.outputs, "INNER": tile.inner, "ACTIVATION": activation, "num_warps": tile.warps,
           "num_stages": tile.stages, "enable_fp_fusion": False}  # fmt: skip
    num_tiles, output_tiles = len(tiles) - 1, triton.cdiv(num_outputs, tile.outputs)
    if tile.is_persistent:
        halves = 2 if activation == "swiglu" else 1
        box = [halves, tile.outputs // halves, tile.inner]
        lines = _gather(x, pairs, expert_weights.shape[1]) if is_up else x
        _experts_persistent[(min(gpu_of(x.device).multiprocessors, num_tiles * output_tiles),)](
            TensorDescriptor.from_tensor(lines, [tile.tokens, tile.inner]),
            TensorDescriptor.from_tensor(weight.view(-1, num_outputs // halves, num_inputs), box),
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
    width = x.shape[1]
    lines = torch.empty(len(pairs), width, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(width))
    _copy_lines[len(pairs), triton.cdiv(width, block)](
        x, pairs, lines, len(x), width, x.stride(0), SLOTS=num_slots, BLOCK=block, num_warps=4
    )
    return lines


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort(expert_ids, pairs, tiles, num_pairs, num_tiles, EXPERTS: tl.constexpr, BINS: tl.constexpr,
          TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # Grid: experts; each finds its pairs, in order, and where they stand behind those of lower experts.
    # Tile: BLOCK pairs at a time, read twice.
    # Traffic: E * P ids read (from L2), P pairs and the tiles written.
    expert = tl.program_id(0)
    lane, bin_ = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        id_ = tl.load(expert_ids + first + lane, mask=first + lane < num_pairs, other=-1)
        known = (id_ >= 0) & (id_ < EXPERTS)
        counts += tl.histogram(tl.where(known, id_, 0), BINS, mask=known)
    size = tl.sum(tl.where(bin_ == expert, counts, 0), axis=0)
    place = tl.sum(tl.where(bin_ < expert, counts, 0), axis=0)
    num_before = tl.sum(tl.where(bin_ < expert, (counts + TOKENS - 1) // TOKENS, 0), axis=0)
    end = place + size
    num_mine = (size + TOKENS - 1) // TOKENS
    for i in range(num_mine):
        _write_tile(tiles, num_before + i, expert, place + i * TOKENS, end)
    if expert == EXPERTS - 1:
        for i in range(num_before + num_mine, num_tiles):
            _write_tile(tiles, i, -1, 0, 0)
        tl.store(tiles + num_tiles * 4, num_before + num_mine)
    for first in range(0, num_pairs, BLOCK):
        id_ = tl.load(expert_ids + first + lane, mask=first + lane < num_pairs, other=-1)
        mine = (id_ == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(mine, axis=0) - 1, first + lane, mask=mine != 0)
        place += tl.sum(mine, axis=0)


@triton.jit
def _write_tile(tiles, tile, expert, first, end):
    tl.store(tiles + tile * 4, expert)
    tl.store(tiles + tile * 4 + 1, first)
    tl.store(tiles + tile * 4 + 2, end)


@triton.jit
def _experts(x, weight, y, pairs, tiles, expert_weights, num_outputs, num_inputs, x_len, y_len,
             SLOTS: tl.constexpr, IS_UP: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr,
             TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
             ACTIVATION: tl.constexpr):  # fmt: skip
    # Grid: tiles of pairs x tiles of outputs, neighbours in the same expert's weights.
    # Tile: [TOKENS, OUTPUTS] of one expert, the whole inner dimension.
    # Traffic: an expert's weights once per tile of its pairs (from L2 but for the first), x per output tile.
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    if expert < 0:
        return
    first, end = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    place = first + tl.arange(0, TOKENS)
    inside = place < end
    place = tl.minimum(place, end - 1).to(tl.int64)
    pair = tl.load(pairs + place).to(tl.int64)
    x_lines = x + (pair // SLOTS if IS_UP else place) * x_len
    first_output = tl.program_id(1) * OUTPUTS
    row = row_of(first_output, num_outputs, OUTPUTS, ACTIVATION).to(tl.int64)
    weight_lines = weight + (expert * num_outputs + row) * num_inputs
    total = chain(x_lines, inside, weight_lines, num_inputs, WHOLE, WEIGHT_FIRST, TOKENS, OUTPUTS, INNER)
    _leave(total, y, expert_weights, place, pair, inside, first_output, num_outputs, y_len, IS_UP, DTYPE,
           OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_persistent(x, weight, y, pairs, tiles, expert_weights, num_outputs, num_inputs, num_tiles, y_len,
                        SLOTS: tl.constexpr, IS_UP: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
                        OUTPUTS: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
                        GROUP: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x (in the order of pairs) and weight are
    # descriptors.
    # Tile: [TOKENS, OUTPUTS] of one expert, the whole inner dimension.
    # Traffic: an expert's weights once per group of tiles, x once per output tile, mostly from L2; y once.
    num_real, num_output_tiles = tl.load(tiles + num_tiles * 4), tl.cdiv(num_outputs, OUTPUTS)
    for step in tl.range(tl.program_id(0), num_real * num_output_tiles, tl.num_programs(0), flatten=True):
        output_tile, tile = place_of(step, num_output_tiles, num_real, GROUP)
        expert, first = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        first_output = output_tile * OUTPUTS
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, num_inputs, INNER):
            a = x.load([first, start])
            b = tl.reshape(weight.load([expert * HALVES, first_output // HALVES, start]), (OUTPUTS, INNER))
            total = tl.dot(a, b.T, total)
        end = tl.load(tiles + tile * 4 + 2)
        place = first + tl.arange(0, TOKENS)
        inside = place < end
        pair = tl.load(pairs + place, mask=inside, other=0).to(tl.int64)
        _leave(total, y, expert_weights, place.to(tl.int64), pair, inside, first_output, num_outputs, y_len,
               IS_UP, DTYPE, OUTPUTS, ACTIVATION)  # fmt: skip


@triton.jit
def _leave(total, y, expert_weights, place, pair, inside, first_output, num_outputs, y_len,
           IS_UP: tl.constexpr, DTYPE: tl.constexpr, OUTPUTS: tl.constexpr,
           ACTIVATION: tl.constexpr):  # fmt: skip
    """Stores a tile: after the activation in the order of pairs, or weighed where its tokens' slots are."""
    total = activate(total, ACTIVATION)
    halved: tl.constexpr = OUTPUTS // total.shape[1]
    column = first_output // halved + tl.arange(0, OUTPUTS // halved)
    if not IS_UP:
        total = total * tl.load(expert_weights + pair, mask=inside, other=0.0)[:, None]
    lines = y + (place if IS_UP else pair) * y_len
    mask = inside[:, None] & (column < num_outputs // halved)[None, :]
    tl.store(lines[:, None] + column[None, :], total.to(DTYPE), mask=mask)


@triton.jit
def _copy_lines(x, pairs, lines, num_tokens, width, x_len, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: pairs x blocks of channels.
    # Tile: BLOCK channels of one pair's token.
    # Traffic: P * F elements read (tokens from L2 but once), as many written.
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(pairs + place).to(tl.int64) // SLOTS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width) & (token >= 0) & (token < num_tokens)
    value = tl.load(x + token * x_len + at, mask=inside, other=0.0)
    tl.store(lines + place * width + at, value, mask=at < width)


@triton.jit
def _combine(out, expert_ids, y, width, num_experts, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of one token, slot after slot.
    # Traffic: T * K * F elements read, T * F written.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(expert_ids + pair)
        known = (expert >= 0) & (expert < num_experts)
        total += tl.load(out + pair * width + at, mask=(at < width) & known, other=0.0).to(tl.float32)
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=at < width)
