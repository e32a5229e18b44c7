"""The causal depthwise convolution, compiled: taps are added in one order, wherever columns come from."""

import numpy as np
import torch

from hemiola.plugins.grid import step_work
from hemiola.plugins.jit import Kernel, helper, lines
from hemiola.plugins.simd import LANES, copy, f32, fma, get, get_long, load, put, silu, store, take, unpack

BLOCK = 16  # tokens that a thread takes at a time


def conv(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, W]
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    snapshot_edge: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E], silu applied; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot, snapshot_edge)
    step = step_work(rows, chunk_len, columns.shape[1] - weight.shape[1] + 1, columns.shape[0], x.shape[0])
    y = (torch.empty if step.num_tokens == x.shape[0] else torch.zeros)(x.shape)
    x = lines(x)
    new = (x.data_ptr(), x.stride(0), columns.data_ptr())
    sizes = (step.address, step.num_rows, columns.shape[1], *weight.shape, *new)
    size, num_blocks = step.num_tokens * weight.shape[0], -(-step.num_tokens // BLOCK)
    _convolve(num_blocks, 0.6 * size, *sizes, weight.data_ptr(), bias.data_ptr(), y.data_ptr())
    _store(step.num_rows, 0.2 * min(size, step.num_rows * columns[0].numel()), *sizes)
    return y


@Kernel
def _convolve(call):
    """An item is BLOCK tokens, counted over all rows. x_len is from token to token of x."""
    (
        num_items, rows, num_rows, ring_len, channels, width, x, x_len, columns, weight, bias, y,
    ) = unpack(call, 11)  # fmt: skip
    taps, window = np.empty(width * channels, np.float32), np.empty(width * channels, np.float32)
    for i in range(channels):
        for tap in range(width):
            put(taps, tap * channels + i, get(weight, i * width + tap))
    while True:
        item = take(call)
        if item >= num_items:
            break
        begin, seen = item * BLOCK, 0
        for row in range(num_rows):
            slot, first = get_long(rows, row), get_long(rows, num_rows + row)
            committed, end = get_long(rows, 2 * num_rows + row), get_long(rows, 3 * num_rows + row)
            for position in range(
                committed + max(begin - seen, 0), min(end, committed + begin + BLOCK - seen)
            ):
                t = first + position - committed
                if position - committed >= width - 1:
                    _filter(x, (t - width + 1) * x_len, x_len, channels, width, taps, bias, y, t * channels)
                    continue
                for tap in range(width):
                    place = position - width + 1 + tap
                    if place < 0:
                        window[tap * channels : (tap + 1) * channels] = f32(0.0)
                    elif place < committed:
                        source = (slot * ring_len + place % ring_len) * channels
                        copy(columns, source, window, tap * channels, channels)
                    else:
                        copy(x, (first + place - committed) * x_len, window, tap * channels, channels)
                _filter(window, 0, channels, channels, width, taps, bias, y, t * channels)
            seen += end - committed


@helper
def _filter(source, at, stride, channels, width, taps, bias, y, y_at):
    """silu(bias + sum of the columns from `at` on, each times its tap)"""
    for i in range(0, channels, LANES):
        sums = load(bias, i)
        for tap in range(width):
            sums = fma(load(source, at + tap * stride + i), load(taps, tap * channels + i), sums)
        store(y, y_at + i, silu(sums))


@Kernel
def _store(call):
    """First the snapshot of a row takes its columns, then the new tokens take the place of old ones."""
    num_items, rows, num_rows, ring_len, channels, width, x, x_len, columns = unpack(call, 8)
    while True:
        row = take(call)
        if row >= num_items:
            break
        slot, first = get_long(rows, row), get_long(rows, num_rows + row)
        committed, end = get_long(rows, 2 * num_rows + row), get_long(rows, 3 * num_rows + row)
        new_edge, snapshot = get_long(rows, 5 * num_rows + row), get_long(rows, 6 * num_rows + row)
        if snapshot > 0:
            edge = get_long(rows, 7 * num_rows + row)
            for place in range(max(edge - width + 1, 0), edge):
                target = (snapshot * ring_len + place % ring_len) * channels
                if place < committed:
                    copy(columns, (slot * ring_len + place % ring_len) * channels, columns, target, channels)
                else:
                    copy(x, (first + place - committed) * x_len, columns, target, channels)
        for place in range(max(committed, new_edge - width + 1), end):
            target = (slot * ring_len + place % ring_len) * channels
            copy(x, (first + place - committed) * x_len, columns, target, channels)
