"""How ranks exchange on GPUs (plugins/ranks.py has the words): programs write into the memory of the others.

A message goes in lines of 8 bytes. On its way each half of a line has the number of its piece beside it, in
one store: who reads that number has the half, too, so nothing else is signalled, and a message takes one
passage between two GPUs. Program p of every rank exchanges with program p of the others: it sends up to
LINES lines, waits for everybody's, and goes on to the next piece. A rank's window has room for two pieces of
each program of each rank. Who sends piece n + 1 has all ranks' piece n, which they sent when they had read
piece n - 1: so the place of that one is free. Between two launches the same holds, since a kernel begins when
the one before it has ended. Numbers wrap around.

A long message goes in blocks instead: programs write their lines as they are, and then one number for all of
them, which is released behind them and acquired before they are read. That is half of the bytes, and a
passage more. Blocks have places of their own, in the same turns.

Whoever waits looks at the word at STOP (in the host's memory) now and then; if it is not zero, the engine has
lost a rank, and what comes out is nothing that anybody may read. Each thread's look at that word is a read of
its own over PCIe, 21 ns of the bus: when all threads of 128 programs looked at once, their GPU was 1.4 to 2.8
ms late, the other one's threads lost patience in turn, and so every sum took that long from then on. So the
threads that wait for lines look at different times, and for a block one thread waits.
"""

import triton
import triton.language as tl

from hemiola.plugins.gpu.early import INTERPRETED
from hemiola.plugins.gpu.windows import BLOCK, LINE_BYTES, LINES, PAYLOAD
from hemiola.plugins.ranks import PROGRAMS as _PROGRAMS
from hemiola.plugins.ranks import RANK as _RANK
from hemiola.plugins.ranks import STOP as _STOP
from hemiola.plugins.ranks import WINDOWS as _WINDOWS

PROGRAMS, RANK, STOP = tl.constexpr(_PROGRAMS), tl.constexpr(_RANK), tl.constexpr(_STOP)
WINDOWS, PLACE = tl.constexpr(_WINDOWS), tl.constexpr(LINES * LINE_BYTES)
LINE, BLOCK_PLACE = tl.constexpr(LINE_BYTES), tl.constexpr(BLOCK * PAYLOAD)
# Neither branches in Triton's own language, whose compiler (3.6) fails on that: a rank is not its own peer.
SEND = tl.constexpr("""{
    .reg .pred p;
    setp.ne.u32 p, $5, 0;
    @p st.volatile.global.v4.u32 [$1], {$2, $4, $3, $4};
    mov.u32 $0, 0;
    }""")
RECEIVE = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 first, second, left, word;
    mov.u32 $0, $2;
    mov.u32 $1, $3;
    setp.eq.u32 p, $7, 0;
    @p bra there;
    mov.u32 left, %tid.x;
    mad.lo.u32 left, left, 16, 1024;
    again:
    ld.volatile.global.v4.u32 {$0, first, $1, second}, [$4];
    setp.eq.u32 p, first, $5;
    setp.eq.and.u32 p, second, $5, p;
    @p bra there;
    nanosleep.u32 40;
    sub.u32 left, left, 1;
    setp.ne.u32 p, left, 0;
    @p bra again;
    mov.u32 left, 8192;
    ld.volatile.global.u32 word, [$6];
    setp.eq.u32 p, word, 0;
    @p bra again;
    there:
    }""")
POST = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 p, thread, 0;
    setp.ne.and.u32 p, $3, 0, p;
    @p st.release.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
    }""")
AWAIT = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 left, word;
    mov.u32 $0, 0;
    mov.u32 word, %tid.x;
    setp.ne.u32 p, word, 0;
    setp.eq.or.u32 p, $4, 0, p;
    @p bra there;
    mov.u32 left, 1024;
    again:
    ld.relaxed.sys.global.u32 word, [$1];
    setp.eq.u32 p, word, $2;
    @p bra come;
    nanosleep.u32 40;
    sub.u32 left, left, 1;
    setp.ne.u32 p, left, 0;
    @p bra again;
    mov.u32 left, 1024;
    ld.volatile.global.u32 word, [$3];
    setp.eq.u32 p, word, 0;
    @p bra again;
    come:
    ld.acquire.sys.global.u32 word, [$1];
    there:
    }""")


@triton.jit
def place(group, rank, sender, number, RANKS: tl.constexpr):
    """Where the lines of this program's piece lie, in a rank's window."""
    turn = (number & 1).to(tl.int64) * RANKS + sender
    return tl.load(group + WINDOWS + rank) + (turn * PROGRAMS + tl.program_id(0)) * PLACE


@triton.jit
def send(group, other, lane, low, high, number, rank, RANKS: tl.constexpr):
    """Lines to another rank; low, high: their halves, int32."""
    address = place(group, other, rank, number, RANKS) + lane.to(tl.int64) * LINE
    is_peer = other != rank
    if INTERPRETED:
        words, mark = address.to(tl.pointer_type(tl.int64)), number.to(tl.int64) << 32
        live = (lane >= 0) & is_peer
        tl.store(words, mark | (low.to(tl.int64) & 0xFFFFFFFF), mask=live)
        tl.store(words + 1, mark | (high.to(tl.int64) & 0xFFFFFFFF), mask=live)
    else:
        tl.inline_asm_elementwise(
            SEND, "=r,l,r,r,r,r", [address, low, high, number, is_peer.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def receive(group, sender, lane, low, high, number, rank, stop, RANKS: tl.constexpr):
    """The halves of a rank's lines; low, high: this rank's own."""
    address = place(group, rank, sender, number, RANKS) + lane.to(tl.int64) * LINE
    is_peer = sender != rank
    if INTERPRETED:
        if not is_peer:
            return low, high
        words, ends = address.to(tl.pointer_type(tl.int64)), stop.to(tl.pointer_type(tl.int64))
        low, high = tl.load(words, volatile=True), tl.load(words + 1, volatile=True)
        while _waits(low, high, number) & (tl.load(ends, volatile=True) == 0):
            low, high = tl.load(words, volatile=True), tl.load(words + 1, volatile=True)
        return low.to(tl.int32), high.to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            RECEIVE, "=&r,=&r,r,r,l,r,l,r", [low, high, address, number, stop, is_peer.to(tl.int32)],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _waits(low, high, number):
    mark = number.to(tl.int64)
    return tl.max((((low >> 32) != mark) | ((high >> 32) != mark)).to(tl.int32), 0) != 0


@triton.jit
def send_to_all(group, lane, low, high, number, rank, RANKS: tl.constexpr):
    """Lines of this rank to every other one."""
    for other in tl.static_range(RANKS):
        send(group, other, lane, low, high, number, rank, RANKS)


@triton.jit
def block(group, rank, sender, lane, number, RANKS: tl.constexpr):
    """Where the lines of this program's block lie, in a rank's window: behind the places of all lines."""
    turn = ((number & 1).to(tl.int64) * RANKS + sender) * PROGRAMS + tl.program_id(0)
    first = tl.load(group + WINDOWS + rank) + 2 * RANKS * PROGRAMS * PLACE + turn * BLOCK_PLACE
    return tl.multiple_of(first, LINE).to(tl.pointer_type(tl.int64)) + lane


@triton.jit
def _mark(group, rank, sender, number, RANKS: tl.constexpr):
    """Where the number of a block stands: behind the places of all blocks."""
    turn = ((number & 1).to(tl.int64) * RANKS + sender) * PROGRAMS + tl.program_id(0)
    blocks = 2 * RANKS * PROGRAMS * (PLACE + BLOCK_PLACE)
    return tl.load(group + WINDOWS + rank) + blocks + turn * LINE


@triton.jit
def put(group, other, lane, words, live, number, rank, RANKS: tl.constexpr):
    """Lines of a block to another rank; words: int64."""
    tl.store(block(group, other, rank, lane, number, RANKS), words, mask=live & (other != rank))


@triton.jit
def post(group, number, rank, RANKS: tl.constexpr):
    """All that this program has put for the others can be read."""
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        address = _mark(group, other, rank, number, RANKS)
        if INTERPRETED:
            tl.store(address.to(tl.pointer_type(tl.int32)), number, mask=other != rank)
        else:
            tl.inline_asm_elementwise(
                POST, "=r,l,r,r", [address, number, (other != rank).to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def expect(group, sender, number, rank, stop, RANKS: tl.constexpr):
    """The first thread waits until a rank has posted its block for this program; a barrier must follow."""
    address = _mark(group, rank, sender, number, RANKS)
    if INTERPRETED:
        if sender != rank:
            mark, ends = address.to(tl.pointer_type(tl.int32)), stop.to(tl.pointer_type(tl.int64))
            while (tl.load(mark, volatile=True) != number) & (tl.load(ends, volatile=True) == 0):
                pass
    else:
        tl.inline_asm_elementwise(
            AWAIT, "=&r,l,r,l,r", [address, number, stop, (sender != rank).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def taken(group, sender, lane, words, live, number, rank, RANKS: tl.constexpr):
    """The lines of a rank's block that has been posted; words: this rank's own."""
    theirs = tl.load(
        block(group, rank, sender, lane, number, RANKS), mask=live & (sender != rank), other=0, volatile=True
    )
    return tl.where(sender == rank, words, theirs)


@triton.jit
def split(words):
    """The halves of lines, int64."""
    return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def join(low, high):
    """Lines of their halves."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
