"""The truth: a log-softmax in fp64, by torch's own kernels."""

import torch

from hemiola.plugins.step.draw.reference import best_ids


def logprobs(
    scores: torch.Tensor,  # [L, V] fp32
    token_ids: torch.Tensor,  # [L] int64
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of token_ids [L]; then ids and values of the best [L, num_top], or of all if there are fewer."""
    wide = scores.to(torch.float64)
    wide -= wide.amax(-1, keepdim=True)
    wide -= _sum(wide.exp()).log()
    top = best_ids(scores, num_top)[:, :num_top]
    return wide.gather(1, token_ids.unsqueeze(1)).squeeze(1), top, wide.gather(1, top)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Of each line [L, 1], in an order that depends on V only."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat((folded, values[:, 2 * half :]), 1)
    return values
