"""What was proposed, for the host."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import ANSWERS, DRAFTS, LINE, PROPOSED, SLOT, TOTAL, WIDTH


@triton.jit(do_not_specialize=["num_slots", "ids_len", "answers_len", "width", "most"])
def _tell(plan, lengths, ids, answers, num_slots, ids_len, answers_len, width, most, BLOCK: tl.constexpr):
    # Grid: rows.
    # Tile: BLOCK drafts, at least `most`.
    # Traffic: a row's number of drafts, and the drafts.
    n, lane = tl.program_id(0), tl.arange(0, BLOCK)
    row = plan + n * WIDTH
    slot = tl.load(row + SLOT).to(tl.int64)
    if tl.load(row + LINE) < tl.load(row + WIDTH + LINE):
        answer = answers + n.to(tl.int64) * answers_len + width
        tl.store(answer + PROPOSED, tl.load(lengths + DRAFTS * num_slots + slot))
        text = ids + slot * ids_len + tl.load(lengths + TOTAL * num_slots + slot)
        draft = tl.load(text + lane, mask=lane < most, other=0)
        tl.store(answer + ANSWERS + lane, draft.to(tl.int64), mask=lane < most)
