"""One fp32 chain per output, rounded as IEEE's fused multiply-add; and sizes at which kernels may slip."""

import numpy as np
import torch

SIZES = [  # outputs, inputs: strips and stretches that are full, begun, and one too long
    (1, 1), (17, 5), (31, 250), (32, 256), (33, 257), (64, 16), (100, 513), (129, 40), (290, 300),
]  # fmt: skip
NUM_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25)  # every height of a tile, and two tiles


def make(num_tokens: int, num_outputs: int, num_inputs: int, halves: bool, seed: int = 0) -> tuple:
    """x [T, F], a weight [O, F], bfloat16 or fp32, and a bias [O]."""
    print("seed", seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_inputs, generator=rng)
    weight = torch.randn(num_outputs, num_inputs, generator=rng)
    return x, weight.bfloat16() if halves else weight, torch.randn(num_outputs, generator=rng)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once.

    In float64 the product is exact and the sum rounded to odd, which the rounding to fp32 cannot mistake.
    """
    p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = p + c
    part = total - p
    error = (p - (total - part)) + (c - part)
    bits = total.view(np.int64)
    nudge = np.where((error > 0) == (total > 0), 1, -1)
    bits += np.where((error != 0) & (bits % 2 == 0), nudge, 0)
    return total.astype(np.float32)


def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, O], input after input."""
    columns, rows = x.numpy(), weight.float().numpy()
    y = np.zeros((len(columns), len(rows)), np.float32)
    for i in range(columns.shape[1]):
        y = fma(columns[:, i, None], rows[None, :, i], y)
    return torch.from_numpy(y if bias is None else y + bias.numpy())
