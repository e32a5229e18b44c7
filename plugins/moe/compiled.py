"""A mixture of experts, compiled: an expert takes all its tokens at once, in the chains of a dense layer.

A (token, slot) pair has a line in the order of the experts; lines meet again when a token's slots are added
in their order. So a token's bits depend on it, its experts and its weights alone.
"""

import torch

from hemiola.plugins.cpu.jit import Kernel, lines
from hemiola.plugins.cpu.simd import (
    LANES,
    f32,
    fma,
    get,
    get_int,
    get_long,
    largest,
    load_some,
    mul,
    put_long,
    silu,
    splat,
    store_some,
)
from hemiola.plugins.linear.compiled import BLOCK, SCRATCH, multiply, split, work
from hemiola.plugins.moe.spec import ACTIVATIONS

LINES = 16  # lines or tokens of an item


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K]
    up: torch.Tensor,  # pack([E, J, F])
    down: torch.Tensor,  # pack([E, F, I])
    activation: str,
    inner: int,  # I
) -> torch.Tensor:  # [T, F]
    """See reference.py."""
    num_tokens, num_slots = expert_ids.shape
    width, num_experts, num_lines = x.shape[1], up.shape[0], num_tokens * num_slots
    num_hidden = inner * ACTIVATIONS[activation]
    if (num_experts, width, inner) != (down.shape[0], up.shape[2], down.shape[2]):
        raise ValueError(f"moe: {tuple(up.shape)} and {tuple(down.shape)} are not one layer's packed experts")
    y = torch.empty(num_tokens, width)
    if not num_lines:
        return y.zero_()
    num_blocks = min(num_experts, num_lines) + num_lines // BLOCK
    plan = torch.empty(1 + 2 * num_lines + 3 * num_blocks, dtype=torch.int64)
    wrong = plan.data_ptr()
    tokens, places, blocks = (wrong + 8 * n for n in (1, 1 + num_lines, 1 + 2 * num_lines))
    ids, shares = expert_ids.contiguous(), expert_weights.contiguous()
    grouping = (num_lines, num_slots, num_experts, num_blocks, ids, wrong, tokens, places, blocks)
    _group(1, 0.0, *grouping, scratch=8 * num_experts)
    if plan[0].item():
        raise ValueError(f"moe: an expert is none of 0 .. {num_experts - 1}")

    def times(
        source: torch.Tensor, rows: int, packed: torch.Tensor, num_inputs: int, num_outputs: int
    ) -> torch.Tensor:
        """The lines' rows of source times their experts' weights."""
        result = torch.empty(num_lines, num_outputs)
        num_groups = split(packed.shape[1], num_blocks)
        size = packed[0].numel()
        cost = work(size * min(num_experts, num_lines), packed.itemsize, 0) + work(size, 0, num_lines)
        multiply(
            num_blocks * num_groups, cost, num_blocks, blocks, num_lines, num_groups,
            source, source.stride(0), rows, packed, packed.dtype is torch.bfloat16, num_inputs, num_outputs,
            0, result, scratch=SCRATCH,
        )  # fmt: skip
        return result

    hidden = times(lines(x), tokens, up, width, num_hidden)
    _activate(
        -(-num_lines // LINES), 0.1 * num_lines * inner, num_lines, inner, num_hidden,
        ACTIVATIONS[activation], hidden, scratch=4 * LANES,
    )  # fmt: skip
    parts = times(hidden, 0, down, inner, width)
    _combine(
        -(-num_tokens // LINES), 0.1 * num_lines * width, num_tokens, num_slots, width,
        places, shares, parts, y, scratch=4 * LANES,
    )  # fmt: skip
    return y


@Kernel
def _group(item, scratch, num_lines, num_slots, num_experts, num_blocks, ids, wrong, tokens, places, blocks):
    """One item: lines in the order of the experts, and the blocks of lines of one expert."""
    put_long(wrong, 0, 0)
    for expert in range(num_experts):
        put_long(scratch, expert, 0)
    for pair in range(num_lines):
        expert = get_int(ids, pair)
        if expert < 0 or expert >= num_experts:
            put_long(wrong, 0, 1)
            return
        put_long(scratch, expert, get_long(scratch, expert) + 1)
    block, line = 0, 0
    for expert in range(num_experts):
        count = get_long(scratch, expert)
        put_long(scratch, expert, line)
        num_parts = (count + BLOCK - 1) // BLOCK
        for part in range(num_parts):
            first, last = count * part // num_parts, count * (part + 1) // num_parts
            put_long(blocks, 3 * block, expert)
            put_long(blocks, 3 * block + 1, line + first)
            put_long(blocks, 3 * block + 2, last - first)
            block += 1
        line += count
    for unused in range(block, num_blocks):
        for n in range(3):
            put_long(blocks, 3 * unused + n, 0)
    for pair in range(num_lines):
        expert = get_int(ids, pair)
        place = get_long(scratch, expert)
        put_long(scratch, expert, place + 1)
        put_long(tokens, place, pair // num_slots)
        put_long(places, pair, place)


@Kernel
def _activate(item, scratch, num_lines, inner, num_hidden, kind, hidden):
    """An item is LINES lines: the first `inner` numbers of each become what `down` takes."""
    for n in range(item * LINES, min(num_lines, (item + 1) * LINES)):
        line = n * num_hidden
        for i in range(0, inner, LANES):
            count = inner - i
            value = load_some(hidden, line + i, count, scratch)
            if kind == 1:
                positive = largest(value, splat(f32(0.0)))
                value = mul(positive, positive)
            else:
                value = mul(silu(value), load_some(hidden, line + inner + i, count, scratch))
            store_some(hidden, line + i, count, value, scratch)


@Kernel
def _combine(item, scratch, num_tokens, num_slots, width, places, shares, parts, y):
    """An item is LINES tokens: their experts' outputs, weighted and added in the order of the slots."""
    for token in range(item * LINES, min(num_tokens, (item + 1) * LINES)):
        for i in range(0, width, LANES):
            count, sums = width - i, splat(f32(0.0))
            for pair in range(token * num_slots, (token + 1) * num_slots):
                part = load_some(parts, get_long(places, pair) * width + i, count, scratch)
                sums = fma(splat(get(shares, pair)), part, sums)
            store_some(y, token * width + i, count, sums, scratch)
