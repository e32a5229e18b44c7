"""Rotary positions, one token at a time."""

import torch


def rope(
    x: torch.Tensor,  # [T, H, D]
    positions: torch.Tensor,  # [T] int32
    table: torch.Tensor,  # [M, 2, R]: cos and sin of every place and pair
) -> torch.Tensor:  # [T, H, D]
    """Channel i < R turns with channel i + R by its place's angle; channels behind 2 R are kept.

    Su et al. 2021, arXiv 2104.09864, with the two halves side by side as in GPT-NeoX; in fp32 (float64 for
    float64), in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = table.shape[2]
    y = x.to(wide).clone()
    for t, position in enumerate(positions.tolist()):
        cos, sin = table[position].to(wide)
        first, second = y[t, :, :pairs].clone(), y[t, :, pairs : 2 * pairs].clone()
        y[t, :, :pairs] = first * cos - second * sin
        y[t, :, pairs : 2 * pairs] = second * cos + first * sin
    return y.to(x.dtype)
