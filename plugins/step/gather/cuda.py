"""The logits of all ranks side by side, on GPUs."""

import torch

from hemiola.plugins.gpu.launch import Kernel
from hemiola.plugins.gpu.windows import PAYLOAD, pieces_of
from hemiola.plugins.ranks import size_of

_gather = Kernel("step.gather", "_gather")


def gather(logits: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """See reference.py. A rank has an even number of logits of each line."""
    logits, size = logits.contiguous(), size_of(group)
    num, width = logits.shape
    y = torch.empty(num, width * size, dtype=logits.dtype, device=logits.device)
    line_len = width * logits.itemsize // PAYLOAD
    pieces = pieces_of(num * line_len)
    _gather[(pieces.programs,)](
        logits.view(torch.int64), group, y.view(torch.int64), num * line_len, line_len,
        RANKS=size, BLOCK=pieces.lines, num_warps=pieces.warps,
    )  # fmt: skip
    return y
