"""The embedding of tokens, compiled: a line is gathered from the strips of a dense layer's weight."""

import torch

from hemiola.plugins.cpu.jit import Kernel
from hemiola.plugins.cpu.simd import LANES, get, get_half, get_int, put

BLOCK = 4  # tokens of an item of work


def embed(
    weight: torch.Tensor,  # [strips, F, lanes], as linear.compiled.pack makes it of [V, F]
    token_ids: torch.Tensor,  # [T] int32
    vocab_size: int,
) -> torch.Tensor:  # [T, F] fp32
    """See reference.py. Raises IndexError for an id that is not in the vocabulary."""
    y = torch.empty(len(token_ids), weight.shape[1])
    if not y.numel():
        return y
    low, high = token_ids.aminmax()
    if low < 0 or high >= vocab_size:
        raise IndexError(f"embed: ids {int(low)} to {int(high)} in a vocabulary of {vocab_size}")
    narrow = weight.dtype == torch.bfloat16
    sizes = (len(token_ids), *weight.shape[1:], narrow)
    _embed(-(-len(token_ids) // BLOCK), 2.0 * y.numel(), *sizes, weight, token_ids.contiguous(), y)
    return y


@Kernel
def _embed(item, scratch, num_tokens, width, lanes, narrow, weight, token_ids, y):
    """An item is BLOCK tokens."""
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        token = get_int(token_ids, t)
        lane = token % lanes
        if narrow == 1:  # lanes j and 16 + j lie side by side
            lane = lane % LANES * 2 + lane // LANES
        at = token // lanes * width * lanes + lane
        for i in range(width):
            value = get_half(weight, at + i * lanes) if narrow == 1 else get(weight, at + i * lanes)
            put(y, t * width + i, value)
