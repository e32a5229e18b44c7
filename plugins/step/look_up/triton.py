"""Drafts by prompt lookup."""

import triton
import triton.language as tl

from hemiola.plugins.step.plan_triton import DRAFTS, ROOM, SLOT, TOTAL, WIDTH


@triton.jit(do_not_specialize=["num_slots", "ids_len", "min_n", "max_n"])
def _look_up(plan, lengths, ids, num_slots, ids_len, min_n, max_n, BLOCK: tl.constexpr):
    # Grid: rows.
    # Tile: BLOCK places of the text, each with the max_n ids up to it.
    # Traffic: the text once; its ids again from the first-level cache.
    row, lane = plan + tl.program_id(0) * WIDTH, tl.arange(0, BLOCK)
    slot, room = tl.load(row + SLOT).to(tl.int64), tl.load(row + ROOM)
    if (room > 0) & (slot > 0):
        total, text = tl.load(lengths + TOTAL * num_slots + slot).to(tl.int32), ids + slot * ids_len
        last = total - 1
        longest, latest = tl.full((BLOCK,), -1, tl.int32), tl.zeros((BLOCK,), tl.int32)  # by lane
        for first in range(0, last, BLOCK):
            place, num = first + lane, tl.zeros((BLOCK,), tl.int32)
            alive = place < last  # a suffix does not find itself
            for n in range(0, max_n):
                alive &= n <= place
                wanted = tl.load(text + tl.maximum(last - n, 0))
                alive &= tl.load(text + place - n, mask=alive, other=0) == wanted
                num += alive.to(tl.int32)
            better = (place < last) & (num >= min_n) & (num >= longest)
            longest, latest = tl.where(better, num, longest), tl.where(better, place, latest)
        most = tl.max(longest, axis=0)
        best = tl.max(tl.where(longest == most, latest, 0), axis=0)
        num_new = tl.where(most >= 0, room, 0)
        tl.store(lengths + DRAFTS * num_slots + slot, num_new.to(tl.int64))
        ahead = lane % tl.maximum(last - best, 1)
        drafts = tl.load(text + best + 1 + ahead, mask=lane < num_new, other=0)
        tl.store(text + total + lane, drafts, mask=lane < num_new)
