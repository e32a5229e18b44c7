"""What users are told of tokens, compiled. Exponentials and logarithms are torch's own, and sums have the
reference's order; so the bits are the same."""

import numpy as np
import torch

from hemiola.plugins.cpu.code import code_of, numbers
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get, get_double, get_long, put_double, put_long
from hemiola.plugins.step.best.compiled import best_of
from hemiola.plugins.step.draw.compiled import AT_ONCE, key_of

f64 = np.float64


def logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See reference.py."""
    scores, code, (num_lines, vocab_size) = numbers(scores), code_of(scores), scores.shape
    num_top, at_once = min(num_top, vocab_size), max(1, AT_ONCE * code.threads // vocab_size)
    highest, sums = (code.empty(num_lines, dtype=torch.float64) for _ in range(2))
    room = code.empty(min(at_once, num_lines), vocab_size, dtype=torch.float64)
    for first in range(0, num_lines, at_once):
        own, span = scores[first : first + at_once], slice(first, first + at_once)
        wide, cost = room[: len(own)], own.numel() * 0.5
        code.call(_shift, len(own), cost, vocab_size, own, highest[span], wide)
        wide.exp_()
        code.call(_fold, len(own), cost, vocab_size, wide, sums[span])
    chosen = code.empty(num_lines, dtype=torch.float64)
    top_ids = code.empty(num_lines, num_top, dtype=torch.int64)
    top = code.empty(num_lines, num_top, dtype=torch.float64)
    given = (vocab_size, scores, highest, sums.log_(), numbers(token_ids), num_top, chosen, top_ids, top)
    code.call(_report, num_lines, num_lines * (0.5 * vocab_size), *given, scratch=8 * num_top)
    return chosen, top_ids, top


@Kernel
def _shift(line, scratch, vocab_size, scores, highest, wide):
    """An item is a line: how far its scores lie below the highest."""
    at, to = scores + 4 * line * vocab_size, wide + 8 * line * vocab_size
    most = f64(get(at, best_of(at, vocab_size)))
    put_double(highest, line, most)
    for i in range(vocab_size):
        put_double(to, i, f64(get(at, i)) - most)


@Kernel
def _fold(line, scratch, vocab_size, values, sums):
    """The sum of each line: its second half is added to the first, until one number is left."""
    at, width = values + 8 * line * vocab_size, vocab_size
    while width > 1:
        half = width // 2
        for i in range(half):
            put_double(at, i, get_double(at, i) + get_double(at, half + i))
        if width > 2 * half:
            put_double(at, half, get_double(at, 2 * half))
        width -= half
    put_double(sums, line, get_double(at, 0))


@Kernel
def _report(line, scratch, vocab_size, scores, highest, logs, token_ids, num_top, chosen, top_ids, top):
    """An item is a line. logs: of its sum."""
    at, ids = scores + 4 * line * vocab_size, top_ids + 8 * line * num_top
    most, log = get_double(highest, line), get_double(logs, line)
    put_double(chosen, line, (f64(get(at, get_long(token_ids, line))) - most) - log)
    if num_top > 0:
        _best(at, vocab_size, num_top, ids, scratch)
    for n in range(num_top):
        put_double(top, line * num_top + n, (f64(get(at, get_long(ids, n))) - most) - log)


@helper
def _best(scores, vocab_size, num, ids, keys):
    """The best `num` tokens, best first; of equals the lowest ids."""
    count = 0
    for i in range(vocab_size):
        key = key_of(scores, i)
        if count == num and key <= get_long(keys, num - 1):
            continue
        place = min(count, num - 1)
        count = min(count + 1, num)
        while place > 0 and get_long(keys, place - 1) < key:
            put_long(keys, place, get_long(keys, place - 1))
            put_long(ids, place, get_long(ids, place - 1))
            place -= 1
        put_long(keys, place, key)
        put_long(ids, place, i)
