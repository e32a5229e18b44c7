"""The best token of each line over all ranks."""

import triton
import triton.language as tl

from hemiola.plugins.gpu.exchange import RANK, STOP, WINDOWS, receive, send_to_all


@triton.jit(do_not_specialize=["num_lines", "width"])
def _agree(logit, token_id, group, highest, tokens, num_lines, width,
           RANKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # Grid: PROGRAMS at most.
    # Tile: BLOCK pairs of a token and the bits of its logit.
    # Traffic: each pair once to every other rank, in 16 bytes.
    lane, rank, stop = tl.arange(0, BLOCK), tl.load(group + RANK), tl.load(group + STOP)
    counter = group + WINDOWS + RANKS + tl.program_id(0)
    number = tl.load(counter).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_lines, tl.num_programs(0) * BLOCK):
        line, number = first + lane, number + 1
        live = line < num_lines
        token = (tl.load(token_id + line, mask=live, other=0) + rank * width).to(tl.int32)
        bits = tl.load(logit + line, mask=live, other=0.0).to(tl.int32, bitcast=True)
        send_to_all(group, lane, token, bits, number, rank, RANKS)
        best, best_bits = receive(group, 0, lane, token, bits, number, rank, stop, RANKS)
        for other in tl.static_range(1, RANKS):
            theirs, their_bits = receive(group, other, lane, token, bits, number, rank, stop, RANKS)
            value, known = their_bits.to(tl.float32, bitcast=True), best_bits.to(tl.float32, bitcast=True)
            wins = (known == known) & ((value > known) | (value != value))
            best, best_bits = tl.where(wins, theirs, best), tl.where(wins, their_bits, best_bits)
        tl.store(highest + line, best_bits.to(tl.float32, bitcast=True), mask=live)
        tl.store(tokens + line, best.to(tl.int64), mask=live)
        tl.debug_barrier()  # all threads have read this piece before one of them sends the next
    tl.store(counter, number.to(tl.int64))
