"""The truth: what changes logits before a token is chosen, by torch's own kernels. Order and formulas are
vLLM's."""

import torch

LARGEST = torch.finfo(torch.float32).max


def edit(
    scores: torch.Tensor,  # [L, V] fp32
    prompt_len: torch.Tensor,  # [L] int64
    min_tokens: torch.Tensor,  # [L] int64
    stop_ids: torch.Tensor,  # [L, A] int64
    biased: torch.Tensor,  # [L, D] int64 ids
    biases: torch.Tensor,  # [L, D] fp32
    lasts: torch.Tensor,  # [L, B] int64: bad words' last tokens
    before: torch.Tensor,  # [L, E] int32: their other tokens, each of
    back: torch.Tensor,  # [L, E] int32: so many places before the last one, and of
    word: torch.Tensor,  # [L, E] int32: this word
    penalties: torch.Tensor,  # [L, 3, 1] fp32: repetition, frequency, presence; or of no length: none
    slot: torch.Tensor,  # [L] int64
    position: torch.Tensor,  # [L] int64, of the token to choose
    ids: torch.Tensor,  # [S, W] int32: a slot's prompt, output and drafts
) -> torch.Tensor:
    """Scores [L, V] behind bad words, min_tokens, logit_bias and penalties; ids of -1 only fill a table."""
    scores, ids = scores.clone(), ids[slot]
    words = lasts, before, back, word
    _forbid(scores, prompt_len, min_tokens, stop_ids, words, position, ids)
    if biased.shape[1]:
        at = biased.clamp(min=0)  # what fills the table adds nothing
        scores.scatter_add_(1, at, biases)
    if penalties.shape[1]:
        repetition, frequency, presence = penalties.unbind(1)  # [L, 1] each
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
    prompt_len: torch.Tensor,
    min_tokens: torch.Tensor,
    stop_ids: torch.Tensor,
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    position: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """-inf for stop ids before min_tokens, and for the last token of bad words whose others were written."""
    lasts, before, back, word = words
    width = scores.shape[1] + 1  # the last column is no token's
    forbidden = torch.zeros(len(scores), width, dtype=torch.bool, device=scores.device)
    if lasts.shape[1]:
        written = _written(lasts.shape[1], before, back, word, prompt_len, position, ids)
        _mark(forbidden, torch.where(written, lasts, -1))
    if stop_ids.shape[1]:
        early = position - prompt_len < min_tokens
        _mark(forbidden, torch.where(early.unsqueeze(1), stop_ids, -1))
    scores.masked_fill_(forbidden[:, :-1], -torch.inf)


def _mark(table: torch.Tensor, columns: torch.Tensor) -> None:
    """Of each line; -1 is the last column."""
    table.scatter_(1, torch.where(columns < 0, table.shape[1] - 1, columns).to(torch.int64), True)


def _written(
    num_words: int,
    before: torch.Tensor,
    back: torch.Tensor,
    word: torch.Tensor,
    prompt_len: torch.Tensor,
    position: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Of which bad words [L, B] all but the last token is the end of the output."""
    places = position.unsqueeze(1) - back
    differs = ids.gather(1, places.clamp(min=0)) != before
    differs |= places < prompt_len.unsqueeze(1)
    differs &= before >= 0  # what fills the table
    missed = torch.zeros(len(before), num_words + 1, dtype=torch.bool, device=ids.device)
    _mark(missed, torch.where(differs, word, -1))
    return ~missed[:, :num_words]
