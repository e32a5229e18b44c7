"""Chooses tokens from logits, on the device; the host does not wait.

Everything random is a function of (seed, position). No generator has a state, so a token does not depend on
chunks or preemptions. Nor does it depend on the other lines of a call, by a single bit, on any device: sums
are of integers, where order does not matter. Drafter and trunk choose by the same call.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hemiola.runtime.api import Logprob
from hemiola.runtime.engine.lists import ALL, LARGEST, NO_TOP_P, WORD
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.rules import FEW_BEST, Draws, Edits, Group, groups_of

AT_ONCE = 2**25  # numbers that are widened to 64 bits in one go
SUM_BITS = 62  # of a line's weights


def choose(
    scores: torch.Tensor,  # [L, V] fp32
    rules: Sequence[Rule] | Sequence[Group],  # of the L lines
    slot: torch.Tensor,  # [L] int64
    position: torch.Tensor,  # [L] int64, absolute, of the token to choose
    ids: torch.Tensor,  # [S, W] int32: a slot's prompt, output and drafts
) -> torch.Tensor:
    """The token of each line [L] int64, with history ids[slot, :position]. The lowest id of equals wins."""
    chosen = scores.argmax(-1)  # the first NaN where there is one
    for group in as_groups(rules, scores.device):
        count = len(scores) if group.lines is None else len(group.lines)
        for span in spans(count, max(scores.shape[1], ids.shape[1])):
            part = group.part(span)
            at = span if part.lines is None else part.lines
            chosen[at] = _choose(scores[at], part, slot[at], position[at], ids)
    return chosen


def takes_more_than_best(rules: Sequence[Rule] | Sequence[Group]) -> bool:
    """Whether some line takes more than the argmax of its scores."""
    return any(isinstance(rule, Group) or rule.edits_logits or not rule.greedy for rule in rules)


def widened(scores: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Scores of the lowest ids as scores of all: the others cannot be chosen."""
    missing = vocab_size - scores.shape[1]
    return F.pad(scores, (0, missing), value=-torch.inf) if missing else scores  # pad always copies


def spans(count: int, width: int) -> list[slice]:
    """So many lines of this width, in parts that are not too large; one, if there are none."""
    num_lines = max(1, AT_ONCE // width)
    return [slice(first, first + num_lines) for first in range(0, max(count, 1), num_lines)]


def as_groups(rules: Sequence[Rule] | Sequence[Group], device: torch.device) -> list[Group]:
    """What takes more than an argmax."""
    groups = [group for group in rules if isinstance(group, Group)]
    return groups or groups_of([rule for rule in rules if isinstance(rule, Rule)], device)


def _choose(
    scores: torch.Tensor, group: Group, slot: torch.Tensor, position: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The same for lines that need more than an argmax; scores are left as they are."""
    if group.edits is not None:
        scores = edit_logits(scores.clone(), group.edits, position, ids[slot])
    if group.draws is None:
        return scores.argmax(-1)
    drawn = _draw(weigh(scores, group.draws), uniform(group.draws.seed, position))
    return torch.where(group.draws.greedy, scores.argmax(-1), drawn)


def broken(scores: torch.Tensor) -> torch.Tensor:
    """Lines [L] that no token can be chosen from: with a NaN or +inf, or with nothing but -inf."""
    return ~scores.amax(-1).isfinite()


# What changes logits: order and formulas are vLLM's.


def edit_logits(
    scores: torch.Tensor, edits: Edits, position: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Bad words, min_tokens, logit_bias, penalties. scores [L, V] are overwritten; ids [L, W] are by line."""
    _forbid(scores, edits, position, ids)
    if edits.biased.shape[1]:
        at = edits.biased.clamp(min=0)  # what fills the table adds nothing
        scores.scatter_add_(1, at, edits.biases)
    if edits.penalties.shape[1]:
        repetition, frequency, presence = edits.penalties.unbind(1)  # [L, 1] each
        seen = _counts(ids, torch.zeros_like(position), position, scores.shape[1]) > 0
        output = _counts(ids, edits.prompt_len, position, scores.shape[1])
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


def _forbid(scores: torch.Tensor, edits: Edits, position: torch.Tensor, ids: torch.Tensor) -> None:
    """-inf for stop ids before min_tokens, and for the last token of bad words whose others were written."""
    width = scores.shape[1] + 1  # the last column is no token's
    forbidden = torch.zeros(len(scores), width, dtype=torch.bool, device=scores.device)
    if edits.lasts.shape[1]:
        _mark(forbidden, torch.where(_written(edits, position, ids), edits.lasts, -1))
    if edits.stop_ids.shape[1]:
        early = position - edits.prompt_len < edits.min_tokens
        _mark(forbidden, torch.where(early.unsqueeze(1), edits.stop_ids, -1))
    scores.masked_fill_(forbidden[:, :-1], -torch.inf)


def _mark(table: torch.Tensor, columns: torch.Tensor) -> None:
    """Of each line; -1 is the last column."""
    table.scatter_(1, torch.where(columns < 0, table.shape[1] - 1, columns).to(torch.int64), True)


def _written(edits: Edits, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of which bad words [L, B] all but the last token is the end of the output."""
    num_lines, num_words = edits.lasts.shape
    places = position.unsqueeze(1) - edits.back
    differs = ids.gather(1, places.clamp(min=0)) != edits.before
    differs |= places < edits.prompt_len.unsqueeze(1)
    differs &= edits.before >= 0  # what fills the table
    missed = torch.zeros(num_lines, num_words + 1, dtype=torch.bool, device=ids.device)
    _mark(missed, torch.where(differs, edits.word, -1))
    return ~missed[:, :num_words]


# Draws.


def weigh(scores: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Weights [L, V] int64 that tokens are drawn with: temperature, then min_p, top_k and top_p.

    A filter sees the distribution that the filters before it left; of equals the lowest id is kept first.
    Weights are probabilities relative to the best one, in fp64, rounded so that a sum has 62 bits.
    """
    wide = scores.to(torch.float64)
    wide -= wide.amax(-1, keepdim=True)
    wide /= draws.temperature
    relative = wide.exp_()
    if draws.has_min_p:
        relative.masked_fill_(relative < draws.min_p, 0)
    weights = (relative * 2.0 ** (SUM_BITS - scores.shape[1].bit_length())).round_().to(torch.int64)
    return _filter(weights, scores, draws) if draws.most else weights


def _filter(weights: torch.Tensor, scores: torch.Tensor, draws: Draws) -> torch.Tensor:
    """top_k, then top_p. A CPU looks whether a few tokens are enough, and sorts the vocabulary if not."""
    if scores.device.type == "cpu" and draws.most > FEW_BEST < scores.shape[1]:
        kept, is_enough = _filter_best(weights, scores, draws, FEW_BEST)
        if is_enough.all():
            return kept
    return _filter_best(weights, scores, draws, draws.most)[0]


def _filter_best(
    weights: torch.Tensor, scores: torch.Tensor, draws: Draws, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of the `num` best tokens, and of which lines [L, 1] that is all they leave."""
    order = _best(scores, num)
    ranked = weights.gather(1, order)
    ranks = torch.arange(order.shape[1], device=scores.device)
    ranked.masked_fill_(ranks >= draws.top_k, 0)
    sums = ranked.cumsum(1)
    is_whole = draws.top_k >= ALL
    total = torch.where(is_whole, weights.sum(1, keepdim=True), sums[:, -1:])
    enough = total.to(torch.float64) * draws.top_p
    # a token stays while what is ahead is less
    ranked.masked_fill_((sums - ranked).to(torch.float64) >= enough, 0)
    kept = torch.zeros_like(weights).scatter_(1, order, ranked)
    is_free = is_whole & (draws.top_p >= NO_TOP_P)  # beside others that filter
    ends = is_free | (is_whole & (sums[:, -1:].to(torch.float64) >= enough)) | (draws.top_k <= num)
    return torch.where(is_free, weights, kept), ends


def _best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Ids [L, num] of the best, best first, the lowest id of equals first; all of them if there are fewer."""
    vocab_size = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: no -0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if num >= vocab_size:
        return rising.sort(dim=-1, descending=True, stable=True).indices
    keys = rising.to(torch.int64) * 2**32 - torch.arange(vocab_size, device=scores.device)  # none are equal
    return keys.topk(num).indices


def _draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Tokens [L] by inverse distribution function, in the order of ids. noise [L] is in [0, 1)."""
    sums = weights.cumsum(1)
    total = sums[:, -1:]
    target = (noise.unsqueeze(1) * total.to(torch.float64)).to(torch.int64)  # < total, even when rounded
    token_ids = torch.searchsorted(sums, target, right=True).squeeze(1)
    return token_ids.clamp_(max=weights.shape[1] - 1)  # a broken line has any token


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Random numbers [L] in [0, 1): 53 bits of Philox4x32-10 with key seed [L, 2] and counter position."""
    zero = torch.zeros_like(position)
    counter = (position & WORD, position >> 32, zero, zero)
    high, low, _, _ = philox(counter, (seed[:, 0], seed[:, 1]))
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
    parts = [
        _logprobs(scores[span], token_ids[span], num_top) for span in spans(len(scores), scores.shape[1])
    ]
    if len(parts) == 1:
        return parts[0]
    chosen, top_ids, top = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, top_ids, top


def _logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
