"""Which drafts stay, and the token behind them."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import (
    ACCEPTED,
    BROKEN,
    COMMITTED,
    DRAFTS,
    EDGE,
    JUDGED,
    LINE,
    NUM_DRAFTS,
    SLOT,
    TOKEN,
    TOTAL,
    WIDTH,
)


@triton.jit(do_not_specialize=["num_slots", "ids_len", "answers_len", "width", "chunk_len"])
def _accept(plan, chosen, logit, lengths, ids, answers, num_slots, ids_len, answers_len, width, chunk_len,
            BLOCK: tl.constexpr):  # fmt: skip
    # Grid: rows.
    # Tile: BLOCK lines, at least `width`.
    # Traffic: a row's choices and drafts once.
    n, lane = tl.program_id(0), tl.arange(0, BLOCK)
    row = plan + n * WIDTH
    slot, num_drafts = tl.load(row + SLOT).to(tl.int64), tl.load(row + NUM_DRAFTS)
    num_tokens = tl.load(row + WIDTH + TOKEN) - tl.load(row + TOKEN)
    first = tl.load(row + LINE)
    num_lines = tl.load(row + WIDTH + LINE) - first
    live = (lane < num_lines) & (slot > 0)
    token = tl.load(chosen + first + lane, mask=live, other=0)
    finite = tl.abs(tl.load(logit + first + lane, mask=live, other=0.0)) < float("inf")  # NaN is not below
    own = lengths + slot
    total, final = tl.load(own + TOTAL * num_slots), tl.load(own + COMMITTED * num_slots)
    final += num_tokens - num_drafts
    judged = tl.minimum(num_drafts, tl.load(own + DRAFTS * num_slots))
    text = ids + slot * ids_len + total
    draft = tl.load(text + lane, mask=live & (lane < judged), other=-1).to(tl.int64)
    agrees = (token == draft) & (lane < judged) & finite
    accepted = tl.min(tl.where(agrees, BLOCK, lane), axis=0)
    last = tl.sum(tl.where(lane == accepted, token, 0), axis=0)
    broken = tl.sum(tl.where((lane == accepted) & (finite == 0), 1, 0), axis=0)
    if slot > 0:
        tl.store(own + EDGE * num_slots, final - final % chunk_len)
        tl.store(own + COMMITTED * num_slots, tl.where(num_lines > 0, total + accepted, final))
        if num_lines > 0:
            tl.store(text + accepted, last.to(tl.int32))
            tl.store(own + TOTAL * num_slots, total + accepted + 1)
            tl.store(own + DRAFTS * num_slots, 0)
            answer = answers + n.to(tl.int64) * answers_len
            tl.store(answer + lane, token, mask=live)
            tl.store(answer + width + ACCEPTED, accepted.to(tl.int64))
            tl.store(answer + width + JUDGED, judged.to(tl.int64))
            tl.store(answer + width + BROKEN, broken.to(tl.int64))
