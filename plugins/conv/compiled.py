"""The causal depthwise convolution, compiled: taps are added in one order, wherever columns come from."""

import torch

from hemiola.plugins.cpu.jit import Kernel, helper, lines
from hemiola.plugins.cpu.rows import read_row
from hemiola.plugins.cpu.simd import LANES, clear, copy, fma, load, silu, store
from hemiola.plugins.rows import extent

BLOCK = 16  # tokens of an item of work


def conv(
    x: torch.Tensor,  # [T, E]
    taps: torch.Tensor,  # [W, E]
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E]
    rows: torch.Tensor,  # [N, 8]
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E], silu applied; see reference.py."""
    ring_len, (width, channels) = columns.shape[1], taps.shape
    step = extent(rows, chunk_len, ring_len - width + 1, columns.shape[0], x.shape[0])
    y = (torch.empty if step.num_tokens == x.shape[0] else torch.zeros)(*x.shape)
    if not step.num_tokens:
        return y
    x = lines(x)
    work = (len(rows), chunk_len, ring_len, channels, width, rows, x, x.stride(0), columns)
    size, num_blocks = step.num_tokens * channels, -(-step.num_tokens // BLOCK)
    _convolve(num_blocks, 0.6 * size, *work, taps, bias, y, scratch=4 * width * channels)
    _store(len(rows), 0.2 * min(size, len(rows) * ring_len * channels), *work)
    return y


@Kernel
def _convolve(
    item, scratch, num_rows, chunk_len, ring_len, channels, width, rows, x, x_len, columns, taps, bias, y
):
    """An item is BLOCK tokens, counted over all rows. x_len is from token to token of x."""
    window, begin, seen = scratch, item * BLOCK, 0
    for n in range(num_rows):
        row = read_row(rows, n, chunk_len)
        committed, ring = row.committed, row.slot * ring_len
        for position in range(
            committed + max(begin - seen, 0), min(row.end, committed + begin + BLOCK - seen)
        ):
            t = row.first + position - committed
            if position - committed >= width - 1:
                _filter(x, (t - width + 1) * x_len, x_len, channels, width, taps, bias, y, t * channels)
                continue
            for tap in range(width):
                place = position - width + 1 + tap
                if place < 0:
                    clear(window, tap * channels, channels)
                elif place < committed:
                    copy(columns, (ring + place % ring_len) * channels, window, tap * channels, channels)
                else:
                    copy(x, (row.first + place - committed) * x_len, window, tap * channels, channels)
            _filter(window, 0, channels, channels, width, taps, bias, y, t * channels)
        seen += row.end - committed


@helper
def _filter(source, at, stride, channels, width, taps, bias, y, y_at):
    """silu(bias + sum of the columns from `at` on, each times its tap)"""
    for i in range(0, channels, LANES):
        sums = load(bias, i)
        for tap in range(width):
            sums = fma(load(source, at + tap * stride + i), load(taps, tap * channels + i), sums)
        store(y, y_at + i, silu(sums))


@Kernel
def _store(n, scratch, num_rows, chunk_len, ring_len, channels, width, rows, x, x_len, columns):
    """First the snapshot of row n takes its columns, then the new tokens take the place of old ones."""
    row = read_row(rows, n, chunk_len)
    ring, first, committed = row.slot * ring_len, row.first, row.committed
    if row.snapshot_slot > 0:
        for place in range(max(row.snapshot_edge - width + 1, 0), row.snapshot_edge):
            target = (row.snapshot_slot * ring_len + place % ring_len) * channels
            if place < committed:
                copy(columns, (ring + place % ring_len) * channels, columns, target, channels)
            else:
                copy(x, (first + place - committed) * x_len, columns, target, channels)
    for place in range(max(committed, row.new_edge - width + 1), row.end):
        copy(x, (first + place - committed) * x_len, columns, (ring + place % ring_len) * channels, channels)
