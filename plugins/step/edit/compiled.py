"""What changes logits before a token is chosen, compiled: each line's own text is read, and no table of all
texts is made."""

import numpy as np
import torch

from hemiola.plugins.cpu.code import code_of, numbers
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import f32, get, get_int, get_long, put, put_int
from hemiola.plugins.step.edit.reference import LARGEST

MOST = f32(LARGEST)
NEVER = f32(-np.inf)


def edit(
    scores: torch.Tensor,
    prompt_len: torch.Tensor,
    min_tokens: torch.Tensor,
    stop_ids: torch.Tensor,
    biased: torch.Tensor,
    biases: torch.Tensor,
    lasts: torch.Tensor,
    before: torch.Tensor,
    back: torch.Tensor,
    word: torch.Tensor,
    penalties: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """See reference.py."""
    scores, code, (num_lines, vocab_size) = numbers(scores), code_of(scores), scores.shape
    edited = code.empty(num_lines, vocab_size)
    num_words, num_before, has_penalties = lasts.shape[1], before.shape[1], int(penalties.shape[1] > 0)
    lengths = [value for each in (prompt_len, min_tokens, slot, position) for value in (each, each.stride(0))]
    lists = (numbers(stop_ids), stop_ids.shape[1], numbers(biased), numbers(biases), biased.shape[1])
    assert before.stride() == back.stride() == word.stride(), "they are columns of one table"
    words = (numbers(lasts), num_words, before, back, word, num_before, before.stride(0))
    text = (ids, ids.stride(0), numbers(penalties), has_penalties)
    nanoseconds = num_lines * (vocab_size * (0.2 + 1.5 * has_penalties) + num_before)
    scratch = 4 * max(num_words, 2 * vocab_size * has_penalties)
    given = (vocab_size, scores, edited, *lengths, *lists, *words, *text)
    code.call(_edit, num_lines, nanoseconds, *given, scratch=scratch)
    return edited


@Kernel
def _edit(
    line, scratch, vocab_size, scores, edited, prompt_len, prompt_len_step, min_tokens, min_tokens_step, slot,
    slot_step, position, position_step, stop_ids, num_stops, biased, biases, num_biases, lasts, num_words,
    before, back, word, num_before, before_step, ids, ids_len, penalties, has_penalties,
):  # fmt: skip
    """An item is a line."""
    at, to = scores + 4 * line * vocab_size, edited + 4 * line * vocab_size
    start, end = get_long(prompt_len, line * prompt_len_step), get_long(position, line * position_step)
    text = ids + 4 * get_long(slot, line * slot_step) * ids_len
    for i in range(vocab_size):
        put(to, i, get(at, i))
    entries = 4 * line * before_step
    _miss(text, start, end, before + entries, back + entries, word + entries, num_before, scratch, num_words)
    for n in range(num_words):
        last = get_long(lasts, line * num_words + n)
        if last >= 0 and get_int(scratch, n) == 0:
            put(to, last, NEVER)
    if end - start < get_long(min_tokens, line * min_tokens_step):
        for n in range(num_stops):
            stop = get_long(stop_ids, line * num_stops + n)
            if stop >= 0:
                put(to, stop, NEVER)
    for n in range(num_biases):
        token = max(get_long(biased, line * num_biases + n), 0)  # what fills the table adds nothing
        put(to, token, get(to, token) + get(biases, line * num_biases + n))
    if has_penalties != 0:
        _penalise(to, vocab_size, text, start, end, penalties + 12 * line, scratch)
    for i in range(vocab_size):
        value = get(to, i)
        put(to, i, MOST if value > MOST else value)


@helper
def _miss(text, start, end, before, back, word, num_before, missed, num_words):
    """Marks words of which a token, but for the last, is not at the end of the output."""
    for n in range(num_words):
        put_int(missed, n, 0)
    for n in range(num_before):
        token, place = get_int(before, n), end - get_int(back, n)
        if token >= 0 and (place < start or get_int(text, place) != token):
            put_int(missed, get_int(word, n), 1)


@helper
def _penalise(scores, vocab_size, text, start, end, penalties, counts):
    """counts: of each token in the output, and behind them whether it stands in the text."""
    repetition, frequency, presence = get(penalties, 0), get(penalties, 1), get(penalties, 2)
    for i in range(2 * vocab_size):
        put_int(counts, i, 0)
    for n in range(end):
        token = get_int(text, n)
        put_int(counts, vocab_size + token, 1)
        if n >= start:
            put_int(counts, token, get_int(counts, token) + 1)
    for i in range(vocab_size):
        value, count = get(scores, i), f32(get_int(counts, i))
        if get_int(counts, vocab_size + i) != 0:
            value = value / repetition if value > f32(0.0) else value * repetition
        value = value - frequency * count
        put(scores, i, value - presence * (f32(1.0) if count > f32(0.0) else f32(0.0)))
