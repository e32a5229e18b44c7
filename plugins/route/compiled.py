"""The router of a mixture of experts, compiled: a token at a time, sums in one order."""

import numpy as np
import torch

from hemiola.plugins.cpu.activations import exp, sigmoid
from hemiola.plugins.cpu.code import Operand, code_of, lines, numel
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    f32,
    from_bits,
    get,
    get_int,
    load_some,
    put,
    put_int,
    splat,
    store_some,
    sub,
    total,
)
from hemiola.plugins.sizes import ceil_div

BLOCK = 16  # tokens of an item of work


def route(
    scores: Operand,  # [T, E]
    bias: Operand,  # [E], or zero-length: none
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Operand, Operand]:  # [T, K] fp32 and [T, K] int32
    """See reference.py."""
    code, scores, (num_tokens, num_experts) = code_of(scores), lines(scores), scores.shape
    weights, ids = code.empty(num_tokens, top_k), code.empty(num_tokens, top_k, dtype=torch.int32)
    sizes = (num_tokens, num_experts, top_k, num_groups, top_groups, renormalise, scale)
    how = (scoring == "softmax", bias.shape[0] > 0, bias)
    cost, room = numel(scores) * (2.0 + top_k), 4 * (3 * num_experts + 3 * LANES)
    where = (scores, scores.stride(0), weights, ids)
    code.call(_route, ceil_div(num_tokens, BLOCK), cost, *sizes, *how, *where, scratch=room)
    return weights, ids


@Kernel
def _route(
    item, scratch, num_tokens, num_experts, top_k, num_groups, top_groups, renormalise, scale,
    softmax, biased, bias, scores, scores_len, weights, ids,
):  # fmt: skip
    """An item is BLOCK tokens. scores_len is from token to token."""
    score = scratch + 4 * LANES
    choice = score + 4 * num_experts
    taken = choice + 4 * num_experts
    for t in range(item * BLOCK, min(num_tokens, (item + 1) * BLOCK)):
        if softmax == 1:
            _softmax(scores, t * scores_len, num_experts, score, scratch)
        else:
            for i in range(0, num_experts, LANES):
                raw = load_some(scores, t * scores_len + i, num_experts - i, scratch)
                store_some(score, i, num_experts - i, sigmoid(raw), scratch)
        for i in range(num_experts):
            put(choice, i, get(score, i) + get(bias, i) if biased == 1 else get(score, i))
            put_int(taken, i, 0)
        if top_groups < num_groups:
            _shut_groups(choice, taken, num_experts, num_groups, top_groups)
        sum_ = f32(0.0)
        for k in range(top_k):
            best = _best(choice, taken, 0, num_experts)
            put_int(taken, best, 1)
            put_int(ids, t * top_k + k, best)
            put(weights, t * top_k + k, get(score, best))
            sum_ = sum_ + get(score, best)
        for k in range(top_k):
            weight = get(weights, t * top_k + k)
            if renormalise == 1:
                weight = weight / (sum_ + f32(1e-20))
            put(weights, t * top_k + k, weight * from_bits(scale))


@helper
def _softmax(scores, at, num_experts, score, room):
    """e^(score - highest), each divided by their sum."""
    highest = f32(-np.inf)
    for i in range(num_experts):
        highest = max(highest, get(scores, at + i))
    sums = splat(f32(0.0))
    for i in range(0, num_experts, LANES):
        raised = exp(sub(load_some(scores, at + i, num_experts - i, room), splat(highest)))
        store_some(score, i, num_experts - i, raised, room)
        sums = add(sums, load_some(score, i, num_experts - i, room))
    sum_ = total(sums)
    for i in range(num_experts):
        put(score, i, get(score, i) / sum_)


@helper
def _best(choice, taken, begin, end):
    """The highest that is not taken, the first of equals; if all are NaN, the first."""
    best = -1
    for i in range(begin, end):
        if get_int(taken, i) == 0 and (best < 0 or get(choice, i) > get(choice, best)):
            best = i
    return best


@helper
def _shut_groups(choice, taken, num_experts, num_groups, top_groups):
    """Experts outside the groups whose two best scores sum highest are taken."""
    size = num_experts // num_groups
    for i in range(num_experts):
        put_int(taken, i, 2)
    for _ in range(top_groups):
        best, highest = -1, f32(0.0)
        for group in range(num_groups):
            begin = group * size
            if get_int(taken, begin) != 2:
                continue
            sum_ = _two_best(choice, begin, begin + size)
            if best < 0 or sum_ > highest:
                best, highest = group, sum_
        for i in range(best * size, (best + 1) * size):
            put_int(taken, i, 0)


@helper
def _two_best(choice, begin, end):
    """The sum of the two highest."""
    first, second = f32(-np.inf), f32(-np.inf)
    for i in range(begin, end):
        value = get(choice, i)
        if value > first:
            first, second = value, first
        elif value > second:
            second = value
    return first + second
