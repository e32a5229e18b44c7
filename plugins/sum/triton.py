"""The sum over all ranks: the tree of reference.py, in registers."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.exchange import (
    RANK,
    STOP,
    WINDOWS,
    expect,
    join,
    post,
    put,
    receive,
    send,
    split,
    taken,
)


@triton.jit(do_not_specialize=["num_lines"])
def _sum(x, group, residual, y, num_lines, RANKS: tl.constexpr, WIDE: tl.constexpr, MORE: tl.constexpr,
         BLOCK: tl.constexpr, TWICE: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    # Grid: PROGRAMS at most.
    # Tile: BLOCK lines of 8 bytes, fp32 (WIDE) or bf16; TWICE: of each rank's part, which it adds up for all.
    # Traffic: x once to every other rank, in lines of 16 bytes, or in blocks (WHOLE) as it is; TWICE:
    # 2 (RANKS - 1) / RANKS of x. Residual (MORE) and y once.
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
                live = inside & (theirs < num_lines)
                words = tl.load(x + theirs, mask=live, other=0)
                _give(group, other, lane, words, live, number, rank, RANKS, WHOLE)
            _meet(group, number, rank, stop, RANKS, WHOLE)
            own = rank * part + line
            live = inside & (own < num_lines)
            words = tl.load(x + own, mask=live, other=0)
            more = _more(residual, own, live, MORE)
            words = _tree(group, lane, words, live, more, number, rank, stop, RANKS, WIDE, MORE, WHOLE)
            tl.debug_barrier()
            number += 1
            for other in tl.static_range(RANKS):
                _give(group, other, lane, words, live, number, rank, RANKS, WHOLE)
            _meet(group, number, rank, stop, RANKS, WHOLE)
            for other in tl.static_range(RANKS):
                theirs = other * part + line
                live = inside & (theirs < num_lines)
                found = _take(group, other, lane, words, live, number, rank, stop, RANKS, WHOLE)
                tl.store(y + theirs, found, mask=live)
        else:
            live = line < num_lines
            words = tl.load(x + line, mask=live, other=0)
            for other in tl.static_range(RANKS):
                _give(group, other, lane, words, live, number, rank, RANKS, WHOLE)
            more = _more(residual, line, live, MORE)
            _meet(group, number, rank, stop, RANKS, WHOLE)
            found = _tree(group, lane, words, live, more, number, rank, stop, RANKS, WIDE, MORE, WHOLE)
            tl.store(y + line, found, mask=live)
        tl.debug_barrier()  # all threads have read this piece before one of them sends the next
    tl.store(counter, number.to(tl.int64))


@triton.jit
def _give(group, other, lane, words, live, number, rank, RANKS: tl.constexpr, WHOLE: tl.constexpr):
    """Lines to another rank."""
    if WHOLE:
        put(group, other, lane, words, live, number, rank, RANKS)
    else:
        low, high = split(words)
        send(group, other, lane, low, high, number, rank, RANKS)


@triton.jit
def _meet(group, number, rank, stop, RANKS: tl.constexpr, WHOLE: tl.constexpr):
    """Every rank's block is there; lines say it of themselves."""
    if WHOLE:
        post(group, number, rank, RANKS)
        for other in tl.static_range(RANKS):
            expect(group, other, number, rank, stop, RANKS)
        tl.debug_barrier()


@triton.jit
def _take(group, sender, lane, words, live, number, rank, stop, RANKS: tl.constexpr, WHOLE: tl.constexpr):
    """A rank's lines; words: this rank's own."""
    if WHOLE:
        return taken(group, sender, lane, words, live, number, rank, RANKS)
    else:
        low, high = split(words)
        low, high = receive(group, sender, lane, low, high, number, rank, stop, RANKS)
        return join(low, high)


@triton.jit
def _more(residual, line, live, MORE: tl.constexpr):
    """Lines of the residual, while others are on their way."""
    if MORE:
        return tl.load(residual + line, mask=live, other=0)
    else:
        return line.to(tl.int64)


@triton.jit
def _tree(group, lane, words, live, more, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr,
          MORE: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The sum of all ranks' lines, and more, rounded once."""
    if RANKS == 2:
        a, b, c, d = _two(group, 0, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    elif RANKS == 4:
        a, b, c, d = _four(group, 0, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    else:
        a, b, c, d = _four(group, 0, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
        e, f, g, h = _four(group, 4, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
        a, b, c, d = a + e, b + f, c + g, d + h
    if MORE:
        low, high = split(more)
        e, f, g, h = _as_fp32(low, high, WIDE)
        a, b, c, d = a + e, b + f, c + g, d + h
    if WIDE:
        return join(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True))
    else:
        return join(_rounded(a) | (_rounded(b) << 16), _rounded(c) | (_rounded(d) << 16))


@triton.jit
def _four(group, first, lane, words, live, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    a, b, c, d = _two(group, first, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    e, f, g, h = _two(group, first + 2, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    return a + e, b + f, c + g, d + h


@triton.jit
def _two(group, first, lane, words, live, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr,
         WHOLE: tl.constexpr):  # fmt: skip
    a, b, c, d = _numbers(group, first, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    e, f, g, h = _numbers(group, first + 1, lane, words, live, number, rank, stop, RANKS, WIDE, WHOLE)
    return a + e, b + f, c + g, d + h


@triton.jit
def _numbers(group, sender, lane, words, live, number, rank, stop, RANKS: tl.constexpr, WIDE: tl.constexpr,
             WHOLE: tl.constexpr):  # fmt: skip
    """A rank's."""
    low, high = split(_take(group, sender, lane, words, live, number, rank, stop, RANKS, WHOLE))
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
