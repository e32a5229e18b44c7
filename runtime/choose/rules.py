"""Rules of requests as tensors, a line each: what choosing needs to know of them on the device.

The tables hold the rules of the requests that have a slot, written once, when they open; a step whose lines
are known on the device only reads them there. A step whose lines the host knows brings them along.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.step.draw.reference import ALL, FEW_BEST
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose.rule import Rule, Sizes, lists_of, numbers_of
from hemiola.runtime.device.transfer import upload

NO_LISTS, NOBODYS_NUMBERS = lists_of((), {}, ()), numbers_of(SamplingParams(), 0, 0)
EDITED, DRAWN, FILTERED, LONG = 1, 2, 4, 8  # what a line takes


class Draws(NamedTuple):
    """How lines draw. Where the argmax is taken instead, temperature is 1, and nothing is filtered."""

    temperature: torch.Tensor  # [L, 1] fp64
    min_p: torch.Tensor  # [L, 1] fp64
    top_p: torch.Tensor  # [L, 1] fp64
    top_k: torch.Tensor  # [L, 1] int64; ALL, or the vocabulary or more: all tokens
    seed: torch.Tensor  # [L, 2] int64: low word, high word
    greedy: torch.Tensor  # [L] bool
    has_min_p: bool
    max_top_k: int  # the greatest top_k but for lines that nothing filters; 0: nothing filters any

    def part(self, span: slice) -> "Draws":
        """Some of the lines."""
        return Draws._make(value if isinstance(value, int) else value[span] for value in self)


class Edits(NamedTuple):
    """How lines' logits are changed; ids of -1 are there to fill a table, and change nothing."""

    prompt_len: torch.Tensor  # [L] int64
    min_tokens: torch.Tensor  # [L] int64
    stop_ids: torch.Tensor  # [L, A] int64
    biased: torch.Tensor  # [L, D] int64 ids
    biases: torch.Tensor  # [L, D] fp32
    lasts: torch.Tensor  # [L, B] int64: bad words' last tokens
    before: torch.Tensor  # [L, E] int32: their other tokens, each of
    back: torch.Tensor  # [L, E] int32: so many places before the last one, and of
    word: torch.Tensor  # [L, E] int32: this word
    penalties: torch.Tensor  # [L, 3, 1] fp32: repetition, frequency, presence; or of no length: none


class Group(NamedTuple):
    """Lines of a step that take more than an argmax."""

    lines: torch.Tensor | None  # [n]; None: all
    edits: Edits | None
    draws: Draws | None

    def part(self, span: slice) -> "Group":
        """Some of its lines."""
        return Group(
            None if self.lines is None else self.lines[span],
            self.edits and Edits._make(value[span] for value in self.edits),
            self.draws and self.draws.part(span),
        )


def kinds_of(rule: Rule) -> int:
    """What its lines take: see Group. Filters are a kind of their own, and so are long lists: a table is
    as wide as its widest line."""
    filters = rule.params.top_p < 1 or rule.params.top_k > 0
    is_long = rule.edits_logits and not RuleTable.holds(rule)
    return rule.edits_logits * EDITED + (not rule.greedy) * (DRAWN + FILTERED * filters) + LONG * is_long


def sorts(rule: Rule) -> bool:
    """Whether its filters take more than the FEW_BEST tokens."""
    params = rule.params
    return not rule.greedy and not 0 < params.top_k <= FEW_BEST and (params.top_k > 0 or params.top_p < 1)


def groups_of(rules: Sequence[Rule], device: torch.device) -> list[Group]:
    """Lines with these rules, those of a kind together."""
    lines_of: dict[int, list[int]] = {}
    for line, rule in enumerate(rules):
        if rule.edits_logits or not rule.greedy:
            lines_of.setdefault(kinds_of(rule), []).append(line)
    groups = []
    for kind, lines in lines_of.items():
        group_rules = [rules[line] for line in lines]
        (at,) = upload(device, np.array(lines, np.int64))
        edits = edits_of(group_rules, device) if kind & EDITED else None
        groups.append(Group(at, edits, draws_of(group_rules, device) if kind & DRAWN else None))
    return groups


class RecentGroups:
    """Groups of the last lists of rules: a step has mostly those of the step before."""

    NUM_KEPT = 2  # those of a step's lines, and those of its drafts

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[Rule, ...], list[Group]] = {}

    def __call__(self, rules: Sequence[Rule]) -> list[Group]:
        """See groups_of."""
        key = tuple(rules)
        if key not in self._kept:
            if len(self._kept) == self.NUM_KEPT:
                self._kept.clear()
            self._kept[key] = groups_of(rules, self._device)
        return self._kept[key]


def draws_of(rules: Sequence[Rule], device: torch.device) -> Draws:
    """Draws of lines with these rules."""
    floats, whole = np.stack([r.numbers.floats for r in rules]), np.stack([r.numbers.whole for r in rules])
    max_top_k = max((r.params.top_k or ALL for r in rules if kinds_of(r) & FILTERED), default=0)
    made = upload(device, floats, whole)
    return _draws(made[0], made[1], any(r.params.min_p for r in rules), max_top_k)


def edits_of(rules: Sequence[Rule], device: torch.device) -> Edits:
    """Edits of lines with these rules, in tables as wide as they need. A rule's lists go over once."""
    place = {rule: n for n, rule in enumerate(dict.fromkeys(rules))}
    max_sizes = Sizes._make(map(max, zip(*(rule.lists.sizes for rule in place), strict=True)))
    lists = np.stack([rule.lists.line(max_sizes) for rule in place])
    whole = np.stack([rule.numbers.whole for rule in place])
    penalties = np.stack([rule.numbers.penalties for rule in place])
    if (penalties == (1, 0, 0)).all():
        penalties = penalties[:, :0]
    places = np.array([place[rule] for rule in rules], np.int64)
    line, *made = upload(device, places, whole, lists, penalties)
    return _edits(made[0][line], made[1][line], made[2][line], max_sizes)


class RuleTable:
    """Of every slot: the rule of the request that holds it."""

    HELD = Sizes(stops=32, biases=320, words=64, before=448)  # of the lists

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self._whole = torch.zeros(num_slots, 5, dtype=torch.int64, device=device)
        self._floats = torch.zeros(num_slots, 3, dtype=torch.float64, device=device)
        self._lists = torch.full((num_slots, self.HELD.width), -1, dtype=torch.int32, device=device)
        self._penalties = torch.ones(num_slots, 3, device=device)
        self.open(0, None)

    @classmethod
    def holds(cls, rule: Rule) -> bool:
        """Whether its lists are short enough."""
        return all(size <= held for size, held in zip(rule.lists.sizes, cls.HELD, strict=True))

    def open(self, slot_id: int, rule: Rule | None) -> None:
        """A request takes the slot; None: nobody, which is greedy."""
        if rule is not None and not self.holds(rule):
            rule = None  # it cannot be in a step that reads here
        numbers = rule.numbers if rule else NOBODYS_NUMBERS
        lists = (rule.lists if rule else NO_LISTS).line(self.HELD)
        made = [numbers.whole, numbers.floats, numbers.penalties, lists]
        tables = (self._whole, self._floats, self._penalties, self._lists)
        for table, line in zip(tables, upload(self.device, *made), strict=True):
            table[slot_id].copy_(line)

    def group(self, slot: torch.Tensor, edits: bool, max_top_k: int) -> Group:
        """For lines of these slots [L]: all that may be drawn, and edited. max_top_k: as in Draws."""
        whole, floats = self._whole[slot], self._floats[slot]
        draws = _draws(floats, whole, True, max_top_k)
        if not edits:
            return Group(None, None, draws)
        return Group(None, _edits(whole, self._lists[slot], self._penalties[slot], self.HELD), draws)


def _draws(floats: torch.Tensor, whole: torch.Tensor, has_min_p: bool, max_top_k: int) -> Draws:
    top_k = whole[:, :1]
    return Draws(
        temperature=floats[:, :1],
        min_p=floats[:, 1:2],
        top_p=floats[:, 2:],
        top_k=torch.where(top_k < 0, ALL, top_k),
        seed=whole[:, 1:3],
        greedy=top_k.squeeze(1) < 0,
        has_min_p=has_min_p,
        max_top_k=max_top_k,
    )


def _edits(whole: torch.Tensor, lists: torch.Tensor, penalties: torch.Tensor, sizes: Sizes) -> Edits:
    widths = [sizes.stops, *[sizes.biases] * 2, sizes.words, *[sizes.before] * 3]
    stops, biased, biases, lasts, before, back, word = lists.split(widths, 1)
    return Edits(
        prompt_len=whole[:, 3],
        min_tokens=whole[:, 4],
        stop_ids=stops.to(torch.int64),
        biased=biased.to(torch.int64),
        biases=biases.contiguous().view(torch.float32),
        lasts=lasts.to(torch.int64),
        before=before,
        back=back,
        word=word,
        penalties=penalties.unsqueeze(-1),
    )
