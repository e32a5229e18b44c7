"""The logits of all ranks side by side."""

import torch

from hemiola.plugins.ranks import exchange


def gather(
    logits: torch.Tensor,  # [L, V] fp32 of this rank
    group: torch.Tensor,  # [G] int64, plugins/ranks.py
) -> torch.Tensor:  # [L, V * ranks], the same on all ranks
    """In the order of the ranks, which is that of the tokens."""
    return torch.cat(exchange(group, logits), dim=1)
