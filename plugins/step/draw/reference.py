"""The truth: weights in fp64, filters and a draw by torch's own kernels; the host does not wait.

Everything random is a function of (seed, position). No generator has a state, so a token does not depend on
chunks or preemptions. Nor does it depend on the other lines of a call, by a single bit, on any device: sums
are of integers, where order does not matter.
"""

import torch

WORD = 2**32 - 1
NO_TOP_P = 2.0  # more than all tokens together
ALL = 2**31  # a top_k that leaves all tokens
SUM_BITS = 62  # of a line's weights
FEW_BEST = 1024  # of so many a top_k is found without sorting a vocabulary


def draw(
    scores: torch.Tensor,  # [L, V] fp32
    temperature: torch.Tensor,  # [L, 1] fp64
    min_p: torch.Tensor,  # [L, 1] fp64
    top_p: torch.Tensor,  # [L, 1] fp64; NO_TOP_P: all tokens
    top_k: torch.Tensor,  # [L, 1] int64; ALL, or the vocabulary or more: all tokens
    seed: torch.Tensor,  # [L, 2] int64: low word, high word
    greedy: torch.Tensor,  # [L] bool: the best token is taken instead
    position: torch.Tensor,  # [L] int64, absolute, of the token to choose
    has_min_p: bool,
    most: int,  # the greatest top_k but for lines that nothing filters; 0: nothing filters any
) -> torch.Tensor:
    """Tokens [L]. A broken line has any token; of equals the lowest id is the best."""
    weights = weigh(scores, temperature, min_p, top_p, top_k, has_min_p, most)
    drawn = _draw(weights, uniform(seed, position))
    return torch.where(greedy, scores.argmax(-1), drawn)


def weigh(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    has_min_p: bool,
    most: int,
) -> torch.Tensor:
    """Weights [L, V] int64 that tokens are drawn with: temperature, then min_p, top_k and top_p.

    A filter sees the distribution that the filters before it left; of equals the lowest id is kept first.
    Weights are probabilities relative to the best one, in fp64, rounded so that a sum has 62 bits.
    """
    wide = scores.to(torch.float64)
    wide -= wide.amax(-1, keepdim=True)
    wide /= temperature
    relative = wide.exp_()
    if has_min_p:
        relative.masked_fill_(relative < min_p, 0)
    weights = (relative * 2.0 ** scale_bits(scores.shape[1])).round_().to(torch.int64)
    return _filter(weights, scores, top_p, top_k, most) if most else weights


def scale_bits(vocab_size: int) -> int:
    """The best token weighs 2 to this power."""
    return SUM_BITS - vocab_size.bit_length()


def _filter(
    weights: torch.Tensor, scores: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, most: int
) -> torch.Tensor:
    """top_k, then top_p. A CPU looks whether a few tokens are enough, and sorts the vocabulary if not."""
    if scores.device.type == "cpu" and most > FEW_BEST < scores.shape[1]:
        kept, is_enough = _filter_best(weights, scores, top_p, top_k, FEW_BEST)
        if is_enough.all():
            return kept
    return _filter_best(weights, scores, top_p, top_k, most)[0]


def _filter_best(
    weights: torch.Tensor, scores: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of the `num` best tokens, and of which lines [L, 1] that is all they leave."""
    order = best_ids(scores, num)
    ranked = weights.gather(1, order)
    ranks = torch.arange(order.shape[1], device=scores.device)
    ranked.masked_fill_(ranks >= top_k, 0)
    sums = ranked.cumsum(1)
    is_whole = top_k >= ALL
    total = torch.where(is_whole, weights.sum(1, keepdim=True), sums[:, -1:])
    enough = total.to(torch.float64) * top_p
    # a token stays while what is ahead is less
    ranked.masked_fill_((sums - ranked).to(torch.float64) >= enough, 0)
    kept = torch.zeros_like(weights).scatter_(1, order, ranked)
    is_free = is_whole & (top_p >= NO_TOP_P)  # beside others that filter
    ends = is_free | (is_whole & (sums[:, -1:].to(torch.float64) >= enough)) | (top_k <= num)
    return torch.where(is_free, weights, kept), ends


def best_ids(scores: torch.Tensor, num: int) -> torch.Tensor:
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
