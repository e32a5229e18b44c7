"""Chooses tokens from logits, on the device; the host does not wait.

Everything random is a function of (seed, position). No generator has a state, so a token does not depend on
chunks or preemptions. Nor does it depend on the other lines of a call, by a single bit, on any device: sums
are of integers, where order does not matter. Drafter and trunk choose by the same call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hemiola.runtime.api import Logprob
from hemiola.runtime.engine.request import Rule

AT_ONCE = 2**25  # numbers that are widened to 64 bits in one go
SUM_BITS = 62  # of a line's weights
WORD = 2**32 - 1
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny


def choose(
    scores: torch.Tensor,  # [L, V] fp32
    rules: Sequence[Rule],  # [L]; the lines of a request share the object
    slot: torch.Tensor,  # [L] int64
    position: torch.Tensor,  # [L] int64, absolute, of the token to choose
    ids: torch.Tensor,  # [S, W] int32: a slot's prompt, output and drafts
) -> torch.Tensor:
    """The token of each line [L] int64, with history ids[slot, :position]. The lowest id of equals wins."""
    chosen = scores.argmax(-1)  # the first NaN where there is one
    special = [line for line, rule in enumerate(rules) if rule.edits_logits or not rule.greedy]
    num_lines = max(1, AT_ONCE // max(scores.shape[1], ids.shape[1]))
    for first in range(0, len(special), num_lines):
        lines = special[first : first + num_lines]
        at = _tensor(lines, scores)
        own = [rules[line] for line in lines]
        chosen[at] = _choose(scores[at], own, slot[at], position[at], ids)
    return chosen


def _choose(
    scores: torch.Tensor, rules: list[Rule], slot: torch.Tensor, position: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The same for lines that need more than an argmax; scores are the caller's copy."""
    at, own = _where(rules, lambda rule: rule.edits_logits, scores)
    if own:
        scores[at] = edit_logits(scores[at], own, position[at], ids[slot[at]])
    chosen = scores.argmax(-1)
    at, own = _where(rules, lambda rule: not rule.greedy, scores)
    if own:
        chosen[at] = _draw(weigh(scores[at], own), uniform([rule.seed for rule in own], position[at]))
    return chosen


def _where(
    rules: list[Rule], wanted: Callable[[Rule], bool], like: torch.Tensor
) -> tuple[torch.Tensor, list[Rule]]:
    lines = [line for line, rule in enumerate(rules) if wanted(rule)]
    return _tensor(lines, like), [rules[line] for line in lines]


def _tensor(values: Sequence[Any], like: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor on the device of `like`, without waiting for it."""
    here = torch.tensor(values, dtype=dtype)
    return here.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else here


def broken(scores: torch.Tensor) -> torch.Tensor:
    """Lines [L] that no token can be chosen from: with a NaN or +inf, or with nothing but -inf."""
    return ~scores.amax(-1).isfinite()


# What changes logits: order and formulas are vLLM's.


def edit_logits(
    scores: torch.Tensor, rules: Sequence[Rule], position: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Bad words, min_tokens, logit_bias, penalties. scores [L, V] are overwritten; ids [L, W] are by line."""
    prompt_len = _tensor([rule.prompt_len for rule in rules], scores)
    _forbid(scores, rules, position, prompt_len, ids)
    biases = [
        (line, token_id, min(max(bias, -LARGEST), LARGEST))
        for line, rule in enumerate(rules)
        for token_id, bias in rule.params.logit_bias.items()
    ]
    if biases:
        lines, token_ids, values = zip(*biases, strict=True)
        at = _tensor((lines, token_ids), scores)
        scores[at[0], at[1]] += _tensor(values, scores, torch.float32)
    penalties = [
        (
            min(max(rule.params.repetition_penalty, SMALLEST), LARGEST),
            rule.params.frequency_penalty,
            rule.params.presence_penalty,
        )
        for rule in rules
    ]
    if set(penalties) != {(1.0, 0.0, 0.0)}:
        table = _tensor(penalties, scores, torch.float32)
        repetition, frequency, presence = table.unsqueeze(-1).unbind(1)  # [L, 1] each
        seen = _counts(ids, torch.zeros_like(position), position, scores.shape[1]) > 0
        output = _counts(ids, prompt_len, position, scores.shape[1])
        less = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, less, scores)
        scores -= frequency * output
        scores -= presence * (output > 0)
    return scores.clamp_(max=LARGEST)


def _counts(ids: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often [L, V] fp32 each token stands at the places begin .. end - 1."""
    places = torch.arange(ids.shape[1], device=ids.device)
    inside = (places >= begin.unsqueeze(1)) & (places < end.unsqueeze(1))
    counts = torch.zeros(len(ids), vocab_size, device=ids.device)
    return counts.scatter_add_(1, torch.where(inside, ids, 0).to(torch.int64), inside.to(torch.float32))


def _forbid(
    scores: torch.Tensor,
    rules: Sequence[Rule],
    position: torch.Tensor,
    prompt_len: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """-inf for stop ids before min_tokens, and for the last token of bad words whose others were written."""
    width = scores.shape[1] + 1  # the last column is no token's
    forbidden = torch.zeros(len(rules), width, dtype=torch.bool, device=scores.device)
    output_len = position - prompt_len
    for length, pairs in _words_by_length(rules).items():
        lines = _tensor([line for line, _ in pairs], scores)
        words = _tensor([word for _, word in pairs], scores)
        begin = position[lines] - (length - 1)
        places = begin.unsqueeze(1) + torch.arange(length - 1, device=scores.device)
        written = ids[lines.unsqueeze(1), places.clamp(min=0)] == words[:, :-1]
        hit = written.all(1) & (begin >= prompt_len[lines])
        forbidden[lines, torch.where(hit, words[:, -1], -1)] = torch.ones_like(hit)  # `= True` waits
    stops = [
        (line, stop_id)
        for line, rule in enumerate(rules)
        if rule.params.min_tokens > 0
        for stop_id in rule.stop_ids
    ]
    if stops:
        lines, stop_ids = _tensor(stops, scores).unbind(1)
        least = _tensor([rule.params.min_tokens for rule in rules], scores)
        hit = (output_len < least)[lines]
        forbidden[lines, torch.where(hit, stop_ids, -1)] = torch.ones_like(hit)
    scores.masked_fill_(forbidden[:, :-1], -torch.inf)


def _words_by_length(rules: Sequence[Rule]) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    """(line, word) of every bad word."""
    found: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for line, rule in enumerate(rules):
        for word in rule.bad_words:
            found.setdefault(len(word), []).append((line, word))
    return found


# Draws.


def weigh(scores: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
    """Weights [L, V] int64 that tokens are drawn with: temperature, then min_p, top_k and top_p.

    A filter sees the distribution that the filters before it left; of equals the lowest id is kept first.
    Weights are probabilities relative to the best one, in fp64, rounded so that a sum has 62 bits.
    """
    params = [rule.params for rule in rules]
    wide = scores.to(torch.float64)
    wide -= wide.amax(-1, keepdim=True)
    wide /= _column([own.temperature for own in params], wide)
    relative = wide.exp_()
    if any(own.min_p for own in params):
        relative.masked_fill_(relative < _column([own.min_p for own in params], wide), 0)
    vocab_size = scores.shape[1]
    weights = (relative * 2.0 ** (SUM_BITS - vocab_size.bit_length())).round_().to(torch.int64)
    at, own = _where(
        list(rules), lambda rule: rule.params.top_p < 1 or 0 < rule.params.top_k < vocab_size, scores
    )
    if own:
        weights[at] = _filter(weights[at], scores[at], own)
    return weights


def _filter(weights: torch.Tensor, scores: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
    """top_k, then top_p."""
    vocab_size = scores.shape[1]
    top_k = [rule.params.top_k or vocab_size for rule in rules]
    top_p = [rule.params.top_p if rule.params.top_p < 1 else 2.0 for rule in rules]
    order = _best(scores, max(top_k))
    ranked = weights.gather(1, order)
    ranks = torch.arange(order.shape[1], device=scores.device)
    ranked.masked_fill_(ranks >= _tensor(top_k, scores).unsqueeze(1), 0)
    sums = ranked.cumsum(1)
    enough = sums[:, -1:].to(torch.float64) * _column(top_p, scores)
    ranked.masked_fill_(
        (sums - ranked).to(torch.float64) >= enough, 0
    )  # a token stays while what is ahead is less
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Ids [L, num] of the best, best first, the lowest id of equals first; all of them if there are fewer."""
    vocab_size = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: no -0.0
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = rising * 2**32 - torch.arange(vocab_size, device=scores.device)  # no two are equal
    return keys.argsort(-1, descending=True) if num >= vocab_size else keys.topk(num).indices


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return _tensor(values, like, torch.float64).unsqueeze(1)


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Tokens [L] by inverse distribution function, in the order of ids. noise [L] is in [0, 1)."""
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = (noise.unsqueeze(1) * total.to(torch.float64)).to(torch.int64)  # < total, even when rounded
    token_ids = torch.searchsorted(sums, target, right=True).squeeze(1)
    return token_ids.clamp_(max=weights.shape[1] - 1)  # a broken line has any token


def uniform(seeds: Sequence[int], position: torch.Tensor) -> torch.Tensor:
    """Random numbers [L] in [0, 1): 53 bits of Philox4x32-10 with key seed and counter position."""
    zero = torch.zeros_like(position)
    words = [[seed & WORD for seed in seeds], [seed >> 32 for seed in seeds]]
    key = _tensor(words, position)
    high, low, _, _ = philox((position & WORD, position >> 32, zero, zero), (key[0], key[1]))
    return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53


Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Philox4x32-10 (Salmon et al. 2011), elementwise; 32-bit words in int64, whose products may wrap."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32 & WORD) ^ b ^ low, right & WORD, (left >> 32 & WORD) ^ d ^ high, left & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d


# What users are told.


def logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-softmax, fp64: of token_ids [L]; then ids and values of the best [L, num_top]."""
    wide = scores.to(torch.float64)
    wide -= wide.amax(-1, keepdim=True)
    wide -= _sum(wide.exp()).log()
    top = _best(scores, num_top)[:, :num_top]
    return wide.gather(1, token_ids.unsqueeze(1)).squeeze(1), top, wide.gather(1, top)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Of each line [L, 1], in an order that depends on V only."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat((folded, values[:, 2 * half :]), 1)
    return values


def to_logprobs(
    token_ids: Sequence[int], chosen: torch.Tensor, top_ids: torch.Tensor, top: torch.Tensor
) -> list[Logprob]:
    """What `logprobs` computed, for users."""
    return [
        Logprob(token_id, value, tuple(zip(*best, strict=True)))
        for token_id, value, *best in zip(
            token_ids, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True
        )
    ]
