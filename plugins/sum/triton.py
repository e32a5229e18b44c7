"""The sum over all ranks: the tree of reference.py, in registers."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.exchange import (
    RANK,
    STOP,
    WINDOWS,
    join,
    receive,
    send,
    send_to_all,
    split,
)


@triton.jit(do_not_specialize=["num_lines"])
def _sum(x, group, residual, y, num_lines, RANKS: tl.constexpr, WIDE: tl.constexpr,
         MORE: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr):  # fmt: skip
    # Grid: PROGRAMS at most.
    # Tile: BLOCK lines of 8 bytes, fp32 (WIDE) or bf16; TWICE: of each rank's part, which it adds up for all.
    # Traffic: x once to every other rank, in lines of 16 bytes; TWICE: 2 (RANKS - 1) / RANKS of x. Residual
    # (MORE) and y once.
    lane, rank, stop = tl.arange(0, BLOCK), tl.load(group + RANK), tl.load(group + STOP)
    counter = group + WINDOWS + RANKS + tl.program_id(0)
    number = tl.load(counter).to(tl.int32)
    part = num_lines
    if TWICE:
        part = tl.cdiv(num_lines, RANKS)
    for first in range(tl.program_id(0) * BLOCK, part, tl.num_programs(0) * BLOCK):
        line, number = first + lane, number + 1
        if TWICE:
            inside = line < part
            for other in tl.static_range(RANKS):
                theirs = other * part + line
                words = tl.load(x + theirs, mask=inside & (theirs < num_lines), other=0)
                low, high = split(words)
                send(group, other, lane, low, high, number, rank, RANKS)
            own = rank * part + line
            live = inside & (own < num_lines)
            low, high = split(tl.load(x + own, mask=live, other=0))
            more = _more(residual, own, live, MORE)
            low, high = _tree(group, lane, low, high, more, number, rank, stop, RANKS, WIDE, MORE)
            tl.debug_barrier()
            number += 1
            send_to_all(group, lane, low, high, number, rank, RANKS)
            for other in tl.static_range(RANKS):
                theirs = other * part + line
                a, b = receive(group, other, lane, low, high, number, rank, stop, RANKS)
                tl.store(y + theirs, join(a, b), mask=inside & (theirs < num_lines))
        else:
            live = line < num_lines
            low, high = split(tl.load(x + line, mask=live, other=0))
            send_to_all(group, lane, low, high, number, rank, RANKS)
            more = _more(residual, line, live, MORE)
            low, high = _tree(group, lane, low, high, more, number, rank, stop, RANKS, WIDE, MORE)
            tl.store(y + line, join(low, high), mask=live)
        tl.debug_barrier()  # all threads have read this piece before one of them sends the next
    tl.store(counter, number.to(tl.int64))


@triton.jit
def _more(residual, line, live, MORE: tl.constexpr):
    """Lines of the residual, while others are on their way."""
    if MORE:
        return tl.load(residual + line, mask=live, other=0)
    else:
        return line.to(tl.int64)


@triton.jit
def _tree(group, lane, low, high, more, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr,
          MORE: tl.constexpr):  # fmt: skip
    """The sum of all ranks' lines, and more, rounded once, as halves."""
    if RANKS == 2:
        a, b, c, d = _two(group, 0, lane, low, high, number, rank, stop, RANKS, WIDE)
    elif RANKS == 4:
        a, b, c, d = _four(group, 0, lane, low, high, number, rank, stop, RANKS, WIDE)
    else:
        a, b, c, d = _four(group, 0, lane, low, high, number, rank, stop, RANKS, WIDE)
        e, f, g, h = _four(group, 4, lane, low, high, number, rank, stop, RANKS, WIDE)
        a, b, c, d = a + e, b + f, c + g, d + h
    if MORE:
        low, high = split(more)
        e, f, g, h = _as_fp32(low, high, WIDE)
        a, b, c, d = a + e, b + f, c + g, d + h
    if WIDE:
        return a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    else:
        return _rounded(a) | (_rounded(b) << 16), _rounded(c) | (_rounded(d) << 16)


@triton.jit
def _four(group, first, lane, low, high, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr):
    a, b, c, d = _two(group, first, lane, low, high, number, rank, stop, RANKS, WIDE)
    e, f, g, h = _two(group, first + 2, lane, low, high, number, rank, stop, RANKS, WIDE)
    return a + e, b + f, c + g, d + h


@triton.jit
def _two(group, first, lane, low, high, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr):
    a, b, c, d = _numbers(group, first, lane, low, high, number, rank, stop, RANKS, WIDE)
    e, f, g, h = _numbers(group, first + 1, lane, low, high, number, rank, stop, RANKS, WIDE)
    return a + e, b + f, c + g, d + h


@triton.jit
def _numbers(group, sender, lane, low, high, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """A rank's."""
    low, high = receive(group, sender, lane, low, high, number, rank, stop, RANKS)
    return _as_fp32(low, high, WIDE)


@triton.jit
def _as_fp32(low, high, WIDE: tl.constexpr):
    """Four numbers of a line in bf16; of one in fp32 two, and these again."""
    if WIDE:
        a, b = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        return a, b, a, b
    else:
        return _even(low), _odd(low), _even(high), _odd(high)


@triton.jit
def _even(half):
    """The first of two numbers in bf16."""
    return (half << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(half):
    return (half & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(number):
    """Its bits in bf16, to the nearest and to even; Triton's interpreter cuts."""
    bits = number.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(number == number, nearest, 0x7FFF) & 0xFFFF
