"""Chooses tokens from logits, on the device; the host does not wait.

A token depends neither on chunks or preemptions nor on the other lines of a call, by a single bit, on any
device. Drafter and trunk choose by the same call.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from hemiola.plugins.step import forms
from hemiola.runtime.api import Logprob
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import Group, groups_of

AT_ONCE = 2**25  # numbers that are widened to 64 bits in one go
REFERENCE = forms("reference")


def choose(
    scores: torch.Tensor,  # [L, V] fp32
    rules: Sequence[Rule] | Sequence[Group],  # of the L lines
    slot: torch.Tensor,  # [L] int64
    position: torch.Tensor,  # [L] int64, absolute, of the token to choose
    ids: torch.Tensor,  # [S, W] int32: a slot's prompt, output and drafts
    ops: SimpleNamespace = REFERENCE,  # the ops of a step, in the forms that edit and draw
) -> torch.Tensor:
    """The token of each line [L] int64, with history ids[slot, :position]. The lowest id of equals wins."""
    chosen = scores.argmax(-1)  # the first NaN where there is one
    for group in as_groups(rules, scores.device):
        count = len(scores) if group.lines is None else len(group.lines)
        for span in spans(count, max(scores.shape[1], ids.shape[1])):
            part = group.part(span)
            at = span if part.lines is None else part.lines
            chosen[at] = _choose(scores[at], part, slot[at], position[at], ids, ops)
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
    scores: torch.Tensor,
    group: Group,
    slot: torch.Tensor,
    position: torch.Tensor,
    ids: torch.Tensor,
    ops: SimpleNamespace,
) -> torch.Tensor:
    """The same for lines that need more than an argmax; scores are left as they are."""
    if group.edits is not None:
        scores = ops.edit(scores, *group.edits, slot, position, ids)
    if group.draws is None:
        return scores.argmax(-1)
    *rules, has_min_p, max_top_k = group.draws
    return ops.draw(scores, *rules, position, has_min_p, max_top_k)


def broken(scores: torch.Tensor) -> torch.Tensor:
    """Lines [L] that no token can be chosen from: with a NaN or +inf, or with nothing but -inf."""
    return ~scores.amax(-1).isfinite()


# What users are told.


def logprobs(
    scores: torch.Tensor, token_ids: torch.Tensor, num_top: int, ops: SimpleNamespace = REFERENCE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-softmax, fp64: of token_ids [L]; then ids and values of the best [L, num_top]."""
    at_once = spans(len(scores), scores.shape[1])
    parts = [ops.logprobs(scores[span], token_ids[span], num_top) for span in at_once]
    if len(parts) == 1:
        return parts[0]
    chosen, top_ids, top = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, top_ids, top


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
