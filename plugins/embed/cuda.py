"""Rows of the embedding, on CUDA."""

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, cdiv

_embed = Kernel("embed", "_embed")

BLOCK = 1024  # channels of a program


def embed(
    weight: torch.Tensor,  # [V, F]
    token_ids: torch.Tensor,  # [T] int32
) -> torch.Tensor:  # [T, F]
    """See reference.py. An id that is no row gives zeros."""
    check("embed", "weight", weight, (None, None), FLOATS, token_ids.device, apart=1, anywhere=True)
    check("embed", "token_ids", token_ids, (None,), (torch.int32, torch.int64), token_ids.device)
    num_tokens, (num_rows, width) = len(token_ids), weight.shape
    y = torch.empty(num_tokens, width, dtype=weight.dtype, device=weight.device)
    if y.numel():
        grid = (num_tokens, cdiv(width, BLOCK))
        _embed[grid](weight, token_ids, y, weight.stride(0), width, num_rows, BLOCK=BLOCK, num_warps=4)
    return y
