"""What kernels of recurrences on the absolute grid share: a chunk's lines, and which chunks there are."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.rows import live_rows


@triton.jit
def ages(position, committed, end):
    """Which tokens are records, which new."""
    return position < committed, (position >= committed) & (position < end)


@triton.jit
def take(records, tokens, place, column, old, new, real, record_len: tl.constexpr, token_len):
    """The chunk's lines: records, then new tokens, zeros where there is neither."""
    c = tl.arange(0, place.shape[0])
    held = records + (place[:, None] * record_len + column[None, :])
    brought = tokens + (c[:, None] * token_len + column[None, :])
    return tl.load(
        tl.where(old[:, None], held, brought), mask=(old | new)[:, None] & real[None, :], other=0.0
    )


@triton.jit
def places(start, ring_len, LEN: tl.constexpr):
    """Where LEN tokens from `start` on stand in the ring, which is no shorter."""
    place = start % ring_len + tl.arange(0, LEN)
    return tl.where(place < ring_len, place, place - ring_len)


@triton.jit
def chunks_of_kind(rows_ptr, base, num_rows, lowest, highest, CHUNK: tl.constexpr):
    """Of 64 rows from `base` on: how many chunks each has, if it is of these kinds, and their running sum."""
    mine, num, committed, edge = live_rows(rows_ptr, base, num_rows, lowest, highest, CHUNK)
    chunks = tl.where(mine, (committed + num - edge + CHUNK - 1) // CHUNK, 0)
    return chunks, tl.cumsum(chunks, 0)


@triton.jit
def chunk_of(chunks, ends, index):
    """The row, of 64, that has this chunk of all of theirs, and which of its chunks it is."""
    row = tl.sum((ends <= index).to(tl.int32), 0)
    return row, index - tl.sum(tl.where(tl.arange(0, 64) == row, ends - chunks, 0), 0)


@triton.jit
def whose(ticket, edge, low, end, mine, programs, ring_len):
    """Whether new records are for this program to store, and whether for all of these programs'.

    Where they overwrite records that others still read, the last program stores all of them.
    """
    tl.debug_barrier()
    everything = end - edge > ring_len
    if everything & (low < end):
        mine = _last_of(ticket, programs)
    return everything, mine & (low < end)


@triton.jit
def _last_of(ticket, num):
    """Whether all other programs have read what they need; new records may then overwrite it."""
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == num - 1
    if last:
        tl.store(ticket, 0)
    return last
