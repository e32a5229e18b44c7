"""The best token of each line of logits, compiled."""

import numpy as np
import torch

from hemiola.plugins.cpu.code import Operand, code_of, numbers
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    f32,
    get,
    largest,
    load,
    mul,
    peak,
    put,
    put_long,
    splat,
    total,
)


def best(logits: Operand) -> tuple[Operand, Operand]:
    """See reference.py."""
    logits = numbers(logits)
    code, (num_lines, vocab_size) = code_of(logits), logits.shape
    highest, tokens = code.empty(num_lines), code.empty(num_lines, dtype=torch.int64)
    code.call(_best, num_lines, num_lines * (0.15 * vocab_size), vocab_size, logits, highest, tokens)
    return highest, tokens


@Kernel
def _best(line, scratch, vocab_size, logits, highest, tokens):
    """An item is a line."""
    at = logits + 4 * line * vocab_size
    token = best_of(at, vocab_size)
    put(highest, line, get(at, token))
    put_long(tokens, line, token)


@helper
def best_of(at, vocab_size):
    """The first of the best numbers, or the first that is NaN."""
    highest, zeros = splat(f32(-np.inf)), splat(f32(0.0))
    whole = vocab_size // LANES * LANES
    for i in range(0, whole, LANES):
        value = load(at, i)
        highest = largest(value, highest)
        zeros = add(zeros, mul(value, splat(f32(0.0))))  # NaN, if one is not finite
    top, rest = peak(highest), f32(0.0)
    for i in range(whole, vocab_size):
        top, rest = max(top, get(at, i)), rest + get(at, i) * f32(0.0)
    if total(zeros) + rest != f32(0.0):  # also if it is NaN
        return _slowly(at, vocab_size)
    best = 0
    while get(at, best) != top:
        best += 1
    return best


@helper
def _slowly(at, vocab_size):
    """best_of, for numbers that are not all finite."""
    best = 0
    for i in range(1, vocab_size):
        value, known = get(at, i), get(at, best)
        if known == known and (value > known or value != value):
            best = i
    return best
