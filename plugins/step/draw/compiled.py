"""The token of each line that draws, compiled: a few walks over a line, and nothing is sorted.

Exponentials are torch's own, in place, between two kernels; so weights, and with them tokens, are those of
the reference bit for bit. Sums are of integers. What top_k and top_p leave are the tokens down to some key,
a whole number that rises with the score; three histograms of counts and weights, each finer than the one
before, find it.
"""

import numpy as np
import torch

from hemiola.plugins.cpu.code import code_of, numbers
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    get,
    get_byte,
    get_double,
    get_int,
    get_long,
    put_double,
    put_long,
)
from hemiola.plugins.step.best.compiled import best_of
from hemiola.plugins.step.draw.reference import NO_TOP_P, scale_bits

AT_ONCE = 2**17  # numbers of 64 bits that stay in a core's cache
BINS = 2**11  # of a histogram: a count and a weight each
SCRATCH = 16 * BINS
LOWEST = -(2**31)  # key
NO_LIMIT = np.inf
f64, int64 = np.float64, np.int64


def draw(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    greedy: torch.Tensor,
    position: torch.Tensor,
    has_min_p: bool,
    most: int,
) -> torch.Tensor:
    """See reference.py. A line says by itself whether it filters."""
    scores, code, (num_lines, vocab_size) = numbers(scores), code_of(scores), scores.shape
    tokens = code.empty(num_lines, dtype=torch.int64)
    at_once = max(1, AT_ONCE * code.threads // vocab_size)
    weights = code.empty(min(at_once, num_lines), vocab_size, dtype=torch.float64)
    numbers_of_lines = [temperature, min_p, top_p, top_k, seed, greedy, position]
    for first in range(0, num_lines, at_once):
        span = slice(first, first + at_once)
        own, room = scores[span], weights[: len(scores[span])]
        rules = [value for each in numbers_of_lines for value in (each[span], each.stride(0))]
        code.call(_scale, len(own), own.numel() * 0.5, vocab_size, own, *rules[:2], room)
        room.exp_()
        made = (scale_bits(vocab_size), own, room, *rules[2:], tokens[span])
        code.call(_draw, len(own), own.numel() * 1.5, vocab_size, *made, scratch=SCRATCH)
    return tokens


@Kernel
def _scale(line, scratch, vocab_size, scores, temperature, temperature_step, scaled):
    """An item is a line."""
    at, to = scores + 4 * line * vocab_size, scaled + 8 * line * vocab_size
    highest = f64(get(at, best_of(at, vocab_size)))
    divisor = get_double(temperature, line * temperature_step)
    for i in range(vocab_size):
        put_double(to, i, (f64(get(at, i)) - highest) / divisor)


@Kernel
def _draw(
    line, scratch, vocab_size, scale, scores, weights, min_p, min_p_step, top_p, top_p_step, top_k,
    top_k_step, seed, seed_step, greedy, greedy_step, position, position_step, tokens,
):  # fmt: skip
    """An item is a line. weights: e to the power of scaled scores, then weights."""
    at, own = scores + 4 * line * vocab_size, weights + 8 * line * vocab_size
    if get_byte(greedy, line * greedy_step) != 0:
        put_long(tokens, line, best_of(at, vocab_size))
        return
    total = _weigh(own, vocab_size, f64(int64(1) << scale), get_double(min_p, line * min_p_step))
    room, part = get_long(top_k, line * top_k_step), get_double(top_p, line * top_p_step)
    key, ties = LOWEST, vocab_size
    if room < vocab_size:
        key, ties, total = _down_to(at, own, vocab_size, room, NO_LIMIT, scratch)
    if part < NO_TOP_P:
        key, ties, total = _down_to(at, own, vocab_size, room, f64(total) * part, scratch)
    low, high = get_long(seed, line * seed_step), get_long(seed, line * seed_step + 1)
    target = int64(_uniform(low, high, get_long(position, line * position_step)) * f64(total))
    put_long(tokens, line, _token_at(at, own, vocab_size, key, ties, target))


@helper
def _weigh(weights, vocab_size, scale, min_p):
    """Whole numbers in place of the relative probabilities; their sum. What is NaN weighs nothing."""
    total = 0
    for i in range(vocab_size):
        relative = get_double(weights, i)
        weight = int64(np.rint(relative * scale)) if relative >= min_p else int64(0)
        put_long(weights, i, weight)
        total += weight
    return total


@helper
def key_of(scores, i):
    """It rises with the score; zeros of both signs are equal."""
    bits = get_int(scores, i)
    bits = 0 if bits == LOWEST else bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@helper
def _is_enough(count, weight, room, limit):
    """Whether nothing may follow so many tokens of this weight."""
    return count >= room or f64(weight) >= limit


@helper
def _down_to(scores, weights, vocab_size, room, limit, bins):
    """The best tokens that have less than this limit of weight, and fewer than `room`, ahead of them: all
    with a higher key, and so many with this one; their weight."""
    count, weight, begin, bin_ = 0, 0, LOWEST, 0
    for level in range(3):
        step = 22 - 11 * level  # bits of a key that a bin does not look at; of the highest there are 10
        _fill(scores, weights, vocab_size, bins, begin, step)
        bin_ = BINS - 1
        while True:
            more, heavier = count + get_long(bins, 2 * bin_), weight + get_long(bins, 2 * bin_ + 1)
            if bin_ == 0 or _is_enough(more, heavier, room, limit):
                break
            count, weight, bin_ = more, heavier, bin_ - 1
        begin += bin_ << step
    ties, all_ties = 0, get_long(bins, 2 * bin_)
    each = get_long(bins, 2 * bin_ + 1) // max(all_ties, 1)  # equal scores weigh the same
    while ties < all_ties and not _is_enough(count + ties, weight + ties * each, room, limit):
        ties += 1
    return begin, ties, weight + ties * each


@helper
def _fill(scores, weights, vocab_size, bins, begin, step):
    """Counts and weights of the tokens with keys from `begin` on, by bins of 2 to the power of step keys."""
    for i in range(2 * BINS):
        put_long(bins, i, 0)
    for i in range(vocab_size):
        bin_ = (key_of(scores, i) - begin) >> step
        if 0 <= bin_ < BINS:
            put_long(bins, 2 * bin_, get_long(bins, 2 * bin_) + 1)
            put_long(bins, 2 * bin_ + 1, get_long(bins, 2 * bin_ + 1) + get_long(weights, i))


@helper
def _token_at(scores, weights, vocab_size, key, ties, target):
    """The token in whose share of the weights the target lies; the last one where they weigh nothing."""
    below = 0
    for i in range(vocab_size):
        own = key_of(scores, i)
        if own >= key:
            if own == key:
                ties -= 1
            if own > key or ties >= 0:
                below += get_long(weights, i)
                if below > target:
                    return i
    return vocab_size - 1


@helper
def _uniform(low, high, position):
    """In [0, 1), by Philox4x32-10."""
    word = 0xFFFFFFFF
    a, b, c, d = position & word, position >> 32, int64(0), int64(0)
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32 & word) ^ b ^ low, right & word, (left >> 32 & word) ^ d ^ high, left & word
        low, high = (low + 0x9E3779B9) & word, (high + 0xBB67AE85) & word
    return f64((a << 21) | (b >> 11)) * 2.0**-53
