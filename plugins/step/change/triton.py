"""Entries of the page table that changed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num"])
def _change(changes, table, num, BLOCK: tl.constexpr):
    # Grid: blocks of changes.
    # Tile: BLOCK changes.
    # Traffic: places and pages once.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(changes + 2 * at, mask=at < num, other=0)
    page = tl.load(changes + 2 * at + 1, mask=at < num, other=0)
    tl.store(table + place, page.to(tl.int32), mask=at < num)
