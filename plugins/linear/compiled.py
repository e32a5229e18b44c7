"""The dense layer for few tokens, compiled: weights stay bfloat16 in memory, sums are fp32.

Decoding reads every weight once per step, so it runs at the speed of memory; weights that came as bfloat16
lose nothing by being kept so and are half as much to read. They lie in strips of STRIP outputs. Every output
is one chain of fused multiply-adds in the order of the inputs, whatever stands beside it.
"""

import numpy as np
import torch

from hemiola.plugins.jit import Kernel, helper, lines
from hemiola.plugins.simd import (
    LANES,
    add,
    copy,
    f32,
    fma,
    get,
    load,
    load_bfloat16,
    put,
    splat,
    store,
    take,
    unpack,
)  # fmt: skip

STRIP = 4 * LANES
WIDENED = 16  # tokens from which on a strip is widened before it is used
ROWS = 4  # tokens whose sums are kept in registers together
MANY = 256  # from here on a library's blocking wins over the strips, and widening all weights costs little


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight [F, O] as bfloat16 strips [O / STRIP, F, STRIP], rounded up; None if that would change it."""
    half = weight.to(torch.bfloat16)
    if weight.dtype != torch.float32 or not torch.equal(half.to(torch.float32), weight):
        return None
    num_inputs, num_outputs = weight.shape
    strips = torch.nn.functional.pad(half, (0, -num_outputs % STRIP))
    return strips.view(num_inputs, -1, STRIP).transpose(0, 1).contiguous()


def product(
    x: torch.Tensor,  # [T, F]
    packed: torch.Tensor,  # pack(weight [F, O])
    bias: torch.Tensor | None,  # [O]
    num_outputs: int,  # O
    exact: bool,
) -> torch.Tensor:  # [T, O]
    """x times the weight, plus bias. Many tokens are left to a library's GEMM, but for exact numerics."""
    num_tokens, num_inputs = x.shape
    if num_inputs != packed.shape[1]:
        raise ValueError(f"product: x has {num_inputs} columns, the weight {packed.shape[1]} rows")
    if num_tokens > MANY and not exact:
        weight = torch.empty(num_inputs, num_outputs)
        _widen(
            len(packed), 0.1 * packed.numel(), packed.data_ptr(), num_inputs, num_outputs, weight.data_ptr()
        )
        return x.mm(weight) if bias is None else torch.addmm(bias, x, weight)
    x, y = lines(x), torch.empty(num_tokens, num_outputs)
    bias_at = 0 if bias is None else bias.data_ptr()
    work = (
        num_tokens,
        num_inputs,
        num_outputs,
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        bias_at,
        y.data_ptr(),
    )
    _multiply(len(packed), (0.1 + 0.01 * num_tokens) * packed.numel(), *work)
    return y


@Kernel
def _multiply(call):
    """An item is a strip."""
    num_items, num_tokens, num_inputs, num_outputs, x, x_len, packed, bias, y = unpack(call, 8)
    weight, part = np.empty(num_inputs * STRIP, np.float32), np.empty(ROWS * STRIP, np.float32)
    while True:
        strip = take(call)
        if strip >= num_items:
            break
        halves = packed + 2 * strip * num_inputs * STRIP
        wide = num_tokens >= WIDENED
        if wide:
            for i in range(0, num_inputs * STRIP, LANES):
                store(weight, i, load_bfloat16(halves, i))
        first = strip * STRIP
        width = min(STRIP, num_outputs - first)
        for t in range(0, num_tokens, ROWS):
            num_rows = min(ROWS, num_tokens - t)
            if num_rows == ROWS:
                _four(x, t * x_len, x_len, weight, halves, wide, num_inputs, part)
            else:
                for row in range(num_rows):
                    _one(x, (t + row) * x_len, weight, halves, wide, num_inputs, part, row * STRIP)
            for row in range(num_rows):
                at = (t + row) * num_outputs + first
                whole = width // LANES * LANES
                for i in range(0, whole, LANES):
                    value = load(part, row * STRIP + i)
                    store(y, at + i, add(value, load(bias, first + i)) if bias != 0 else value)
                for i in range(whole, width):
                    rest = part[row * STRIP + i]
                    put(y, at + i, rest + get(bias, first + i) if bias != 0 else rest)


@helper
def _four(x, x_at, x_len, weight, halves, wide, num_inputs, part):
    """Four tokens times a strip."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(f32(0.0))
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = splat(f32(0.0))
    for i in range(num_inputs):
        at = i * STRIP
        if wide:
            w0, w1, w2, w3 = (
                load(weight, at),
                load(weight, at + 16),
                load(weight, at + 32),
                load(weight, at + 48),
            )
        else:
            w0, w1 = load_bfloat16(halves, at), load_bfloat16(halves, at + 16)
            w2, w3 = load_bfloat16(halves, at + 32), load_bfloat16(halves, at + 48)
        v = splat(get(x, x_at + i))
        a0, a1, a2, a3 = fma(v, w0, a0), fma(v, w1, a1), fma(v, w2, a2), fma(v, w3, a3)
        v = splat(get(x, x_at + x_len + i))
        b0, b1, b2, b3 = fma(v, w0, b0), fma(v, w1, b1), fma(v, w2, b2), fma(v, w3, b3)
        v = splat(get(x, x_at + 2 * x_len + i))
        c0, c1, c2, c3 = fma(v, w0, c0), fma(v, w1, c1), fma(v, w2, c2), fma(v, w3, c3)
        v = splat(get(x, x_at + 3 * x_len + i))
        d0, d1, d2, d3 = fma(v, w0, d0), fma(v, w1, d1), fma(v, w2, d2), fma(v, w3, d3)
    _keep(part, 0, a0, a1, a2, a3)
    _keep(part, STRIP, b0, b1, b2, b3)
    _keep(part, 2 * STRIP, c0, c1, c2, c3)
    _keep(part, 3 * STRIP, d0, d1, d2, d3)


@helper
def _one(x, x_at, weight, halves, wide, num_inputs, part, part_at):
    """One token times a strip."""
    a0 = a1 = a2 = a3 = splat(f32(0.0))
    for i in range(num_inputs):
        at, v = i * STRIP, splat(get(x, x_at + i))
        if wide:
            a0, a1 = fma(v, load(weight, at), a0), fma(v, load(weight, at + 16), a1)
            a2, a3 = fma(v, load(weight, at + 32), a2), fma(v, load(weight, at + 48), a3)
        else:
            a0, a1 = fma(v, load_bfloat16(halves, at), a0), fma(v, load_bfloat16(halves, at + 16), a1)
            a2, a3 = fma(v, load_bfloat16(halves, at + 32), a2), fma(v, load_bfloat16(halves, at + 48), a3)
    _keep(part, part_at, a0, a1, a2, a3)


@helper
def _keep(part, at, a0, a1, a2, a3):
    store(part, at, a0)
    store(part, at + 16, a1)
    store(part, at + 32, a2)
    store(part, at + 48, a3)


@Kernel
def _widen(call):
    """A strip goes back to its columns of the weight [F, O]."""
    num_items, packed, num_inputs, num_outputs, weight = unpack(call, 4)
    row = np.empty(STRIP, np.float32)
    while True:
        strip = take(call)
        if strip >= num_items:
            break
        width = min(STRIP, num_outputs - strip * STRIP)
        for i in range(num_inputs):
            for j in range(0, STRIP, LANES):
                store(row, j, load_bfloat16(packed, (strip * num_inputs + i) * STRIP + j))
            at = i * num_outputs + strip * STRIP
            whole = width // LANES * LANES
            copy(row, 0, weight, at, whole)
            for j in range(whole, width):
                put(weight, at + j, row[j])
