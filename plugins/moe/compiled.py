"""A mixture of experts, compiled: an expert takes its tokens in turn while its weights are in the cache.

Every output is a sum in one fixed order, so a token's bits depend on it, its experts and its weights alone.
"""

import numpy as np
import torch

from hemiola.plugins.jit import Kernel, lines
from hemiola.plugins.moe.cpu import moe as in_torch
from hemiola.plugins.simd import (
    LANES,
    dots,
    f32,
    fma,
    get,
    get_long,
    largest,
    load,
    mul,
    silu,
    splat,
    store,
    take,
    unpack,
)

MANY = 256
BLOCK = 16  # tokens that a thread takes at a time
ACTIVATIONS = ("relu2", "swiglu")


def moe(
    x: torch.Tensor,  # [T, F]
    expert_ids: torch.Tensor,  # [T, K] int32
    expert_weights: torch.Tensor,  # [T, K]
    up: torch.Tensor,  # [E, J, F]
    down: torch.Tensor,  # [E, F, I]
    activation: str,
    exact: bool,
) -> torch.Tensor:  # [T, F]
    """See reference.py. Many tokens are left to a library's GEMMs, but for exact numerics."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"moe: activation is {activation!r}, expected relu2 or swiglu")
    num_tokens, num_slots = expert_ids.shape
    num_experts, num_hidden, width = up.shape
    fits = num_hidden == down.shape[2] * (1 + ACTIVATIONS.index(activation))
    if not fits or (num_tokens > MANY and not exact):
        return in_torch(x, expert_ids, expert_weights, up, down, activation, exact)
    flat = expert_ids.numpy().ravel()
    order = flat.argsort(kind="stable")
    starts = np.zeros(num_experts + 1, np.int64)
    np.cumsum(np.bincount(flat, minlength=num_experts), out=starts[1:])
    x, shares = lines(x), expert_weights.contiguous()
    parts, y = torch.empty(flat.size, width), torch.empty(num_tokens, width)
    sizes = (width, num_hidden, down.shape[2], num_slots, ACTIVATIONS.index(activation))
    places = (order.ctypes.data, starts.ctypes.data, x.data_ptr(), x.stride(0), parts.data_ptr())
    cost = 0.06 * flat.size * (num_hidden + down.shape[2]) * width
    _expert(num_experts, cost, *sizes, *places, up.data_ptr(), down.data_ptr())
    blocks, cost = -(-num_tokens // BLOCK), 0.1 * parts.numel()
    _combine(blocks, cost, num_tokens, width, num_slots, parts.data_ptr(), shares.data_ptr(), y.data_ptr())
    return y


@Kernel
def _expert(call):
    """An item is an expert; its pairs of a token and a slot are order[starts[e] : starts[e + 1]]."""
    (
        num_items, width, num_hidden, num_inner, num_slots, activation,
        order, starts, x, x_len, parts, up, down,
    ) = unpack(call, 12)  # fmt: skip
    hidden, products = np.empty(num_hidden, np.float32), np.empty(LANES * LANES, np.float32)
    while True:
        expert = take(call)
        if expert >= num_items:
            break
        for n in range(get_long(starts, expert), get_long(starts, expert + 1)):
            pair = get_long(order, n)
            token = pair // num_slots
            dots(up, expert * num_hidden * width, num_hidden, width, x, token * x_len, hidden, 0, products)
            for i in range(0, num_inner, LANES):
                if activation == 0:
                    positive = largest(load(hidden, i), splat(f32(0.0)))
                    store(hidden, i, mul(positive, positive))
                else:
                    store(hidden, i, mul(silu(load(hidden, i)), load(hidden, num_inner + i)))
            dots(down, expert * width * num_inner, width, num_inner, hidden, 0, parts, pair * width, products)


@Kernel
def _combine(call):
    """An item is BLOCK tokens: their experts' outputs, weighted and added in the order of the slots."""
    num_items, num_tokens, width, num_slots, parts, shares, y = unpack(call, 6)
    while True:
        item = take(call)
        if item >= num_items:
            break
        for token in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
            for i in range(0, width, LANES):
                sum_ = splat(f32(0.0))
                for slot in range(num_slots):
                    pair = token * num_slots + slot
                    sum_ = fma(splat(get(shares, pair)), load(parts, pair * width + i), sum_)
                store(y, token * width + i, sum_)
