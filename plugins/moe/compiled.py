"""A mixture of experts, compiled: an expert takes all its tokens at once, in the chains of a dense layer.

A (token, slot) pair has a line in the order of the experts; lines meet again when a token's slots are added
in their order. So a token's bits depend on it, its experts and its weights alone.
"""

import torch

from hemiola.plugins.cpu.activations import silu
from hemiola.plugins.cpu.code import Case, Operand, code_of, lines, numbers
from hemiola.plugins.cpu.kernel import Kernel
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
    splat,
    store_some,
)
from hemiola.plugins.groups import Layout
from hemiola.plugins.linear.compiled import BLOCK, SCRATCH, Packed, split, work
from hemiola.plugins.linear.compiled_e4m3 import product
from hemiola.plugins.moe.spec import ACTIVATIONS
from hemiola.plugins.sizes import ceil_div, least

LINES = 16  # lines or tokens of an item


def moe(
    x: Operand,  # [T, F]
    expert_ids: Operand,  # [T, K] int32
    expert_weights: Operand,  # [T, K]
    up: Operand,  # pack([E, J, F])
    down: Operand,  # pack([E, F, I])
    activation: str,
    inner: int,  # I
    up_layout: Layout | None = None,  # of quantised weights
    down_layout: Layout | None = None,
) -> Operand:  # [T, F]
    """See reference.py."""
    num_tokens, num_slots = expert_ids.shape
    code, width, num_experts, num_lines = code_of(x), x.shape[1], up.shape[0], num_tokens * num_slots
    num_hidden = inner * ACTIVATIONS[activation]
    if num_experts != down.shape[0]:
        raise ValueError(f"moe: {tuple(up.shape)} and {tuple(down.shape)} are not one layer's packed experts")
    num_blocks = least(num_experts, num_lines) + num_lines // BLOCK
    tokens, places = (code.empty(num_lines, dtype=torch.int64) for _ in range(2))
    blocks = code.empty(num_blocks, 3, dtype=torch.int64)
    fault = code.fault(Case(ValueError, f"moe: an expert is none of 0 .. {num_experts - 1}: {{0}}"))
    grouping = (num_lines, num_slots, num_experts, num_blocks, numbers(expert_ids), tokens, places, blocks)
    code.call(_group, 1, num_lines * 4.0, *grouping, fault, scratch=8 * num_experts)

    def times(
        source: Operand,
        rows: Operand,
        packed: Operand,
        layout: Layout | None,
        num_inputs: int,
        num_outputs: int,
    ) -> Operand:
        """The lines' rows of source times their experts' weights."""
        if layout is not None and layout.inputs:
            sizes, experts = (num_lines, num_inputs, num_outputs), (num_blocks, blocks, rows)
            return product(source, packed, layout, sizes, experts=experts)
        form, num_strips = Packed.of(packed, layout, num_outputs, num_inputs), packed.shape[1]
        result = code.empty(num_lines, num_outputs)
        num_groups = split(code, num_strips, num_blocks)
        cost = work(num_strips, num_inputs, form, num_lines, least(num_experts, num_lines))
        kernel, details = form.kernel
        code.call(
            kernel, num_blocks * num_groups, cost, num_blocks, blocks, num_lines, num_groups,
            source, source.stride(0), rows, packed, *details, num_inputs, num_outputs,
            0, 0, 0, result, scratch=SCRATCH,
        )  # fmt: skip
        return result

    hidden = times(lines(x), tokens, up, up_layout, width, num_hidden)
    code.call(
        _activate, ceil_div(num_lines, LINES), num_lines * (0.1 * inner), num_lines, inner, num_hidden,
        ACTIVATIONS[activation], hidden, scratch=4 * LANES,
    )  # fmt: skip
    parts, y = times(hidden, 0, down, down_layout, inner, width), code.empty(num_tokens, width)
    code.call(
        _combine, ceil_div(num_tokens, LINES), num_lines * (0.1 * width), num_tokens, num_slots, width,
        places, numbers(expert_weights), parts, y, scratch=4 * LANES,
    )  # fmt: skip
    return y


@Kernel
def _group(item, scratch, num_lines, num_slots, num_experts, num_blocks, ids, tokens, places, blocks, fault):
    """One item: lines in the order of the experts, and the blocks of lines of one expert."""
    for expert in range(num_experts):
        put_long(scratch, expert, 0)
    for pair in range(num_lines):
        expert = get_int(ids, pair)
        if expert < 0 or expert >= num_experts:
            put_long(fault, 1, expert)
            put_long(fault, 0, 1)
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
