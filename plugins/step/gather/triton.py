"""The logits of all ranks side by side."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.exchange import RANK, STOP, WINDOWS, join, receive, send_to_all, split


@triton.jit(do_not_specialize=["num_lines", "line_len"])
def _gather(logits, group, y, num_lines, line_len, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: PROGRAMS at most.
    # Tile: BLOCK pairs of logits; line_len of them are a rank's of one line.
    # Traffic: a rank's logits once to every other rank, twice as long on the way; all of them written.
    lane, rank, stop = tl.arange(0, BLOCK), tl.load(group + RANK), tl.load(group + STOP)
    counter = group + WINDOWS + RANKS + tl.program_id(0)
    number = tl.load(counter).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_lines, tl.num_programs(0) * BLOCK):
        pair, number = first + lane, number + 1
        live = pair < num_lines
        low, high = split(tl.load(logits + pair, mask=live, other=0))
        send_to_all(group, lane, low, high, number, rank, RANKS)
        place = pair.to(tl.int64) // line_len * RANKS * line_len + pair % line_len
        for other in tl.static_range(RANKS):
            a, b = receive(group, other, lane, low, high, number, rank, stop, RANKS)
            tl.store(y + place + other * line_len, join(a, b), mask=live)
        tl.debug_barrier()  # all threads have read this piece before one of them sends the next
    tl.store(counter, number.to(tl.int64))
