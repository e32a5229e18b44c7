"""What the logits of a step mean: which drafts stay, and each row's next token. On the device.

The law of acceptance, greedy and sampled alike: a choice is the argmax, or a draw whose noise is a function
of the request's seed and the position (sampling.py). The trunk makes the choices that it would make without
drafts, and a draft stays where it equals the choice. So the output is the same, id for id, and a draft is
kept with the probability that the trunk gives it: rejection sampling of a point mass, with a common random
number.
"""

import torch

from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.sampling import choose, logprobs, spans, takes_more_than_best
from hemiola.runtime.engine.step import Batch, Choices, Masks, Verdict


def scores_of(batch: Batch, out: Computed) -> torch.Tensor | Best:
    """What judging takes of a step: no more than the best, where nobody asks for more."""
    choices = batch.choices
    is_greedy = not (choices.asked or batch.masks or takes_more_than_best(choices.rules))
    best = out.best if is_greedy else None
    return out.logits if best is None else best


def judge(batch: Batch, scores: torch.Tensor | Best, ledger: Ledger, chunk_len: int) -> Verdict:
    """Choose, accept, and write the outcome into the ledger. scores: logits [L, V] fp32, or the best."""
    choices = batch.choices
    slot_id = batch.slots
    final_len = batch.final_len
    ledger.committed_len[slot_id] = final_len
    ledger.edge[slot_id] = final_len - final_len % chunk_len
    best = best_of(batch, scores, ledger)
    chosen, bad = best.token_id, ~best.logit.isfinite()
    line_slot = choices.slot_id[choices.row]
    position = ledger.total_len[line_slot] + choices.offset
    num_judged = torch.minimum(choices.num_drafts, ledger.num_drafts[choices.slot_id])
    agrees = (chosen == ledger.ids[line_slot, position]) & (choices.offset < num_judged[choices.row]) & ~bad
    token_ids = _by_row(choices, chosen)
    num_accepted = _by_row(choices, agrees.to(torch.int64)).cumprod(1).sum(1)
    _append(ledger, choices, token_ids, num_accepted)
    return Verdict(
        rows=choices.rows,
        token_ids=token_ids,
        num_accepted=num_accepted,
        num_judged=num_judged,
        broken=_by_row(choices, bad).gather(1, num_accepted.unsqueeze(1)).squeeze(1),
        logprobs=logprobs_of(choices, scores, chosen),
    )


def best_of(batch: Batch, scores: torch.Tensor | Best, ledger: Ledger) -> Best:
    """The token that each line chooses; its logit, or another of the line that is infinite or NaN."""
    if isinstance(scores, Best):
        return scores
    choices, allowed = batch.choices, masked(scores, batch.masks)
    slot = choices.slot_id[choices.row]
    position = ledger.total_len[slot] + choices.offset
    chosen = choose(allowed, choices.rules, slot, position, ledger.ids)
    if takes_more_than_best(choices.rules):
        return Best(allowed.amax(-1), chosen)
    return Best(allowed.gather(1, chosen.unsqueeze(1)).squeeze(1), chosen)


def logprobs_of(
    choices: Choices, scores: torch.Tensor | Best, chosen: torch.Tensor
) -> dict[int, tuple[torch.Tensor, ...]]:
    """By row of the plan that asked for them."""
    if isinstance(scores, Best):
        return {}
    return {row: logprobs(scores[own], chosen[own], num) for row, own, num in choices.asked}


def masked(logits: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    """What may be chosen from: -inf for tokens that a row's grammar forbids."""
    if masks is None:
        return logits
    if masks.lines is not None:
        scores = logits[masks.lines]
        return logits.index_copy(0, masks.lines, _forbid(scores, masks.bits))
    return _forbid(logits.clone(), masks.bits)


def _forbid(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """-inf into `scores` [G, V] where bits [G, words] are not set."""
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    for span in spans(*scores.shape):
        may = ((bits[span].unsqueeze(2) >> places) & 1).flatten(1)[:, : scores.shape[1]].to(torch.bool)
        scores[span].masked_fill_(~may, -torch.inf)
    return scores


def _by_row(choices: Choices, values: torch.Tensor) -> torch.Tensor:
    """[L] as [R, width], zero behind the end of a shorter row."""
    if choices.dense:
        return values.view(-1, choices.width)
    table = values.new_zeros(len(choices.rows), choices.width + 1)
    table[choices.row, choices.offset] = values
    return table[:, : choices.width]


def _append(ledger: Ledger, choices: Choices, token_ids: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Accepted drafts become text where they stand; the next token follows them."""
    slot_id = choices.slot_id
    end = ledger.total_len[slot_id] + num_accepted
    last = token_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    ledger.ids[slot_id, end] = last.to(torch.int32)
    ledger.total_len[slot_id] = end + 1
    ledger.committed_len[slot_id] = end
    ledger.num_drafts.index_fill_(0, slot_id, 0)
