"""The embedding of tokens."""

import torch


def embed(
    weight: torch.Tensor,  # [V, F]
    token_ids: torch.Tensor,  # [T] int32
) -> torch.Tensor:  # [T, F]
    """A token's line of the weight."""
    return torch.stack([weight[token_id].clone() for token_id in token_ids.tolist()] or [weight[:0].sum(0)])[
        : len(token_ids)
    ]
