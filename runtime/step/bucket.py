"""Steps of fixed sizes, for which a GPU has graphs: which there are, and how a plan is put into one.

A bucket holds steps in which every row chooses: one token of each, and its drafts. Rows are padded with rows
of the dump slot, tokens and pairs with some that no row owns. Kinds of rules are part of a bucket, lest a
greedy step pays for sampling.
"""

import itertools
from array import array
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hemiola.plugins.step.plan import COLUMNS
from hemiola.runtime.choose.rules import RuleTable, sorts
from hemiola.runtime.config import Resolved
from hemiola.runtime.schedule.plan import Plan, Row
from hemiola.runtime.step.pack import MasksOfRows, padded

A = TypeVar("A")
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
TOKEN = COLUMNS.index("token")
FEW_PAIRS = 128  # a head reads so many in the time of its weights
RULES = GREEDY, DRAWN, SORTED, ANY = range(4)  # of a bucket; ANY: logprobs and grammars, too


class Bucket(NamedTuple):
    """The sizes of a step."""

    rules: int
    rows: int
    tokens: int
    passes: int  # drafts that each row gets at most
    pairs: int  # that a drafting head reads

    @property
    def is_dense(self) -> bool:
        """Every row, padding too, has one token."""
        return self.tokens == self.rows


class Sent(NamedTuple, Generic[A]):
    """What goes over for a step in a bucket: arrays on the host, tensors on the device."""

    plan: A  # [N + 1, 10] int32 (plugins/step/plan.py)
    changes: A  # [E, 2] int64, entries of the page table: place, page
    mask: A  # [T] int64, line of `bits` that says what a token's logits may choose, where there are grammars
    bits: A  # [1 + T, words] int32; the first: everything. The last, since only those used go over


def num_changes(rows: int) -> int:
    """Pages that rows may have got since the last step in a bucket; more go over by themselves."""
    return 2 * rows + 8


def num_words(vocab_size: int) -> int:
    """Of 32 tokens each."""
    return -(-vocab_size // 32)


def shapes_of(bucket: Bucket, vocab_size: int) -> Sent[tuple[tuple[int, ...], type]]:
    """Shapes and dtypes of what is sent."""
    masked = bucket.tokens if bucket.rules == ANY else 0
    return Sent(
        plan=((bucket.rows + 1, len(COLUMNS)), np.int32),
        changes=((num_changes(bucket.rows), 2), np.int64),
        mask=((masked,), np.int64),
        bits=((1 + masked, num_words(vocab_size) if masked else 0), np.int32),
    )


def buckets_of(config: Resolved) -> list[Bucket]:
    """All that an engine has, the largest first: the others then find memory for their graphs."""
    sizes = [n for n in ROWS if n < config.max_rows] + [config.max_rows]
    buckets = {
        Bucket(rules, rows, *rest)
        for rules, rows in itertools.product(RULES, sizes)
        for rest in _kinds(config, rows)
    }
    return sorted(buckets, key=lambda bucket: bucket[1:] + bucket[:1], reverse=True)


def _kinds(config: Resolved, rows: int) -> Iterable[tuple[int, int, int]]:
    """Tokens, passes and pairs: without drafts, with drafts to make, with drafts to judge, too."""
    yield rows, 0, 0
    num_drafts = config.num_drafts
    if config.drafts == "none":
        return
    owed = rows * (config.chunk_len - 1)
    widths = [4**n for n in range(1, 4) if 4**n < 1 + num_drafts] + [1 + num_drafts]
    totals = {min(rows * width, config.max_step_tokens) for width in widths} - {rows}
    if config.drafts == "ngram":
        yield rows, num_drafts, 0
        yield from ((tokens, num_drafts, 0) for tokens in totals)
        return
    yield rows, 0, rows + owed
    if rows == config.max_step_tokens:  # nothing but drafts for fewer rows
        yield rows, num_drafts, rows + owed
    yield from ((tokens, num_drafts, pairs) for tokens in totals for pairs in (tokens, tokens + owed))
    if config.adaptive_drafts:
        yield from _small_kinds(config, rows)


def _small_kinds(config: Resolved, rows: int) -> Iterable[tuple[int, int, int]]:
    """A trial of one draft is one pass, behind a token of each row, and is judged among two; and where many
    rows owe pairs, those of some are not padded to those of all."""
    two, all_pairs = 2 * rows, rows * config.chunk_len
    yield rows, 1, all_pairs
    if two <= config.max_step_tokens:
        yield two, 1, two
    if max(FEW_PAIRS, two) < all_pairs:
        yield rows, 0, two


class Buckets:
    """Finds the bucket of a plan."""

    def __init__(self, config: Resolved) -> None:
        by_size = sorted(buckets_of(config), key=lambda b: (b.rows, b.tokens, b.passes, b.pairs))
        self._is_head = config.drafts == "mtp"
        self._by_rules = {rules: [bucket for bucket in by_size if bucket.rules == rules] for rules in RULES}

    def __call__(self, plan: Plan) -> Bucket | None:
        """The smallest that holds it; None: it has prompts, or rules that no table holds."""
        rows = plan.rows
        if not all(row.chooses and row.num_tokens == 1 + row.num_drafts for row in rows):
            return None
        if any(row.scored is not None for row in rows):
            return None
        num_tokens, most_room = plan.num_tokens, max(row.room for row in rows)
        num_pairs = sum(row.owed + row.num_tokens for row in rows if row.reads) if self._is_head else 0
        rules = _rules_of(rows)
        for bucket in self._by_rules.get(rules, ()):
            fits = len(rows) <= bucket.rows and most_room <= bucket.passes and num_pairs <= bucket.pairs
            alone = num_tokens == len(rows) if bucket.is_dense else num_tokens <= bucket.tokens
            if fits and alone:
                return bucket
        return None


def _rules_of(rows: list[Row]) -> int:
    kind = GREEDY
    for row in rows:
        rule = row.rule
        if rule.edits_logits or rule.params.logprobs is not None or row.guide is not None:
            if not RuleTable.holds(rule):
                return -1
            kind = ANY
        elif not rule.greedy:
            kind = max(kind, SORTED if sorts(rule) else DRAWN)
    return kind


def send(
    numbers: "array[int]", bucket: Bucket, changes: np.ndarray, words: int, masks: MasksOfRows
) -> Sent[np.ndarray]:
    """A packed plan in a bucket. changes of the page table: at most num_changes; words: of a mask."""
    plan = np.frombuffer(padded(numbers, bucket.rows), np.int32).reshape(-1, len(COLUMNS))
    room = np.zeros((num_changes(bucket.rows), 2), np.int64)  # place 0, of the dump slot, has page 0
    room[: len(changes)] = changes
    if bucket.rules != ANY:
        return Sent(plan, room, np.zeros(0, np.int64), np.zeros((1, 0), np.int32))
    return Sent(plan, room, *_pack_masks(plan[:, TOKEN], bucket.tokens, words, masks))


def _pack_masks(
    firsts: np.ndarray, num_tokens: int, words: int, masks: MasksOfRows
) -> tuple[np.ndarray, np.ndarray]:
    """`mask` and `bits` of Sent. firsts: of each row the first token."""
    mask, bits = np.zeros(num_tokens, np.int64), [np.full(words, 2**32 - 1, np.uint32)]
    for n, lines in masks.items():
        mask[firsts[n] : firsts[n] + len(lines)] = range(len(bits), len(bits) + len(lines))
        bits += [line[:words] for line in lines]
    return mask, np.stack(bits).view(np.int32)
