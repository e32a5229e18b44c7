"""The sum over all ranks, in a fixed order."""

from collections.abc import Sequence

import torch

from hemiola.plugins.ranks import exchange


def sum(
    x: torch.Tensor,  # [T, F] of this rank
    group: torch.Tensor,  # [G] int64, plugins/ranks.py
    residual: torch.Tensor | None = None,  # [T, F], the same on all ranks
) -> torch.Tensor:  # [T, F], the same on all ranks
    """Of the ranks' x in fp32 (float64 for float64): a balanced tree over the ranks, whoever comes first;
    then the residual."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = tree(exchange(group, x.to(wide)))
    return (total if residual is None else total + residual.to(wide)).to(x.dtype)


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, then pairs of neighbours: with 8 parts as with 2 times 4 of them."""
    sums = list(parts)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
