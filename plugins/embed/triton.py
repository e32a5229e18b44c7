"""Rows of the embedding, on CUDA."""

import triton
import triton.language as tl


@triton.jit
def _embed(weight, token_ids, y, weight_len, width, num_rows, BLOCK: tl.constexpr):
    # Grid: tokens x blocks of channels.
    # Tile: BLOCK channels of one row.
    # Traffic: T * F elements read and as many written.
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (row >= 0) & (row < num_rows)
    value = tl.load(weight + row * weight_len + at, mask=(at < width) & known, other=0.0)
    tl.store(y + token * width + at, value, mask=at < width)
