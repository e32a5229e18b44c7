"""The best token of each line, over all ranks."""

import torch

from hemiola.plugins.ranks import RANK, exchange


def agree(
    logit: torch.Tensor,  # [L] fp32, the best of this rank's logits, as step.best leaves it
    token_id: torch.Tensor,  # [L] int64, which of them it is
    group: torch.Tensor,  # [G] int64, plugins/ranks.py
    width: int,  # logits of a rank
) -> tuple[torch.Tensor, torch.Tensor]:  # [L] fp32, [L] int64, the same on all ranks
    """Of equals the lowest token wins; the first rank's NaN wins over all."""
    pairs = torch.stack((token_id + int(group[RANK]) * width, logit.view(torch.int32).long()), 1)
    gathered = torch.stack(exchange(group, pairs))
    logits = gathered[:, :, 1].int().view(torch.float32)
    best = logits.argmax(0, keepdim=True)  # the first of equals, and the first NaN
    return logits.gather(0, best)[0], gathered[:, :, 0].gather(0, best)[0]
