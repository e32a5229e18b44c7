"""Rows of the embedding, on CUDA."""

import torch
import triton
import triton.language as tl

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS

BLOCK = 1024  # channels of a program


def embed(
    weight: torch.Tensor,  # [V, F]
    token_ids: torch.Tensor,  # [T] int32
) -> torch.Tensor:  # [T, F]
    """See reference.py. An id that is no row gives zeros."""
    check("embed", "weight", weight, (None, None), FLOATS, token_ids.device)
    check("embed", "token_ids", token_ids, (None,), (torch.int32, torch.int64), token_ids.device)
    num_tokens, (num_rows, width) = len(token_ids), weight.shape
    y = torch.empty(num_tokens, width, dtype=weight.dtype, device=weight.device)
    if y.numel():
        grid = (num_tokens, triton.cdiv(width, BLOCK))
        _embed[grid](weight, token_ids, y, weight.stride(0), width, num_rows, BLOCK=BLOCK, num_warps=4)
    return y


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
