"""The best token of each line over all ranks, on GPUs."""

import torch

from hemiola.plugins.gpu.launch import Kernel
from hemiola.plugins.gpu.windows import pieces_of
from hemiola.plugins.ranks import size_of

_agree = Kernel("step.agree", "_agree")


def agree(
    logit: torch.Tensor, token_id: torch.Tensor, group: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.py."""
    highest, tokens, num_lines = torch.empty_like(logit), torch.empty_like(token_id), len(logit)
    pieces = pieces_of(num_lines)
    _agree[(pieces.programs,)](
        logit, token_id, group, highest, tokens, num_lines, width,
        RANKS=size_of(group), BLOCK=pieces.lines, num_warps=pieces.warps,
    )  # fmt: skip
    return highest, tokens
