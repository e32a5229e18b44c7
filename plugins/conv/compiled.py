"""The causal depthwise convolution, compiled: taps are added in one order, wherever columns come from."""

from hemiola.plugins.cpu.activations import silu
from hemiola.plugins.cpu.code import Operand, code_of, lines, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.rows import live_tokens, owned, read_row
from hemiola.plugins.cpu.simd import LANES, clear, copy, fma, load, store
from hemiola.plugins.sizes import ceil_div, least

BLOCK = 16  # tokens of an item of work


def conv(
    x: Operand,  # [T, E]
    taps: Operand,  # [W, E]
    bias: Operand,  # [E]
    columns: Operand,  # [S, R, E]
    rows: Operand,  # [N, 8]
    chunk_len: int,
) -> Operand:
    """y[T, E], silu applied; see reference.py."""
    code, x, ring_len, (width, channels) = code_of(x), lines(x), columns.shape[1], taps.shape
    live = live_tokens(rows, x.shape[0], chunk_len, ring_len - width + 1, columns.shape[0])
    y, num_rows = owned(live, *x.shape), rows.shape[0]
    work = (num_rows, chunk_len, ring_len, channels, width, rows, x, x.stride(0), columns)
    where, room = (taps, bias, y), 4 * width * channels
    code.call(_convolve, ceil_div(x.shape[0], BLOCK), numel(x) * 0.6, *work, *where, scratch=room)
    code.call(_store, num_rows, least(numel(x), num_rows * (ring_len * channels)) * 0.2, *work)
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
