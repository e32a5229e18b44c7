"""Steps of fixed sizes, for which a GPU has graphs: which there are, and how a plan is put into one.

A bucket holds steps in which every row chooses: one token of each, and its drafts. Rows are padded with rows
of the dump slot, tokens and pairs with some that no row owns. Kinds of rules are part of a bucket, lest a
greedy step pays for sampling.
"""

import itertools
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.config import Resolved
from hemiola.runtime.engine.feed import known_of, ragged
from hemiola.runtime.engine.rules import RuleTable, sorts
from hemiola.runtime.engine.step import Plan, Row

A = TypeVar("A")
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
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


class Fed(NamedTuple, Generic[A]):
    """What the host knows of a step in a bucket: arrays there, tensors on the device."""

    rows: A  # [N, 8] int32, plugins/rows.py; the rest is int64
    slot: A  # [N]
    num_drafts: A  # [N] to be judged, at most
    room: A  # [N] drafts to be proposed
    row: A  # [T] of a token
    offset: A  # [T] in its row
    token_slot: A  # [T] 0: nobody's token
    line_row: A  # [T] of a token's logits
    line_offset: A  # [T] in its row, or behind all rows' ends
    changes: A  # [C, 2] entries of the page table: place, page
    pair_row: A  # [P]
    pair_offset: A  # [P] behind the row's first token; up to 0 they are owed
    pair_slot: A  # [P] 0: nobody's pair
    head_rows: A  # [N, 8] int32
    last: A  # [N] the pair behind a row's first token
    mask: A  # [T] line of `bits` that says what a token's logits may choose, where there are grammars
    bits: A  # [1 + T, words] int32; the first: everything. The last, since only those used go over


def num_changes(rows: int) -> int:
    """Pages that rows may have got since the last step in a bucket; more go over by themselves."""
    return 2 * rows + 8


def num_words(vocab_size: int) -> int:
    """Of 32 tokens each."""
    return -(-vocab_size // 32)


def shapes_of(bucket: Bucket, vocab_size: int) -> Fed[tuple[tuple[int, ...], type]]:
    """Shapes and dtypes of what is fed."""
    masked = bucket.tokens if bucket.rules == ANY else 0
    n, t, p = (bucket.rows,), (bucket.tokens,), (bucket.pairs,)
    whole = {name: (shape, np.int64) for name, shape in (
        *zip(("slot", "num_drafts", "room", "last"), [n] * 4, strict=True),
        *zip(("row", "offset", "token_slot", "line_row", "line_offset"), [t] * 5, strict=True),
        *zip(("pair_row", "pair_offset", "pair_slot"), [p] * 3, strict=True),
    )}  # fmt: skip
    table = ((bucket.rows, len(COLUMNS)), np.int32)
    return Fed(
        rows=table,
        head_rows=table,
        changes=((num_changes(bucket.rows), 2), np.int64),
        mask=((masked,), np.int64),
        bits=((1 + masked, num_words(vocab_size) if masked else 0), np.int32),
        **whole,
    )


def buckets_of(config: Resolved) -> list[Bucket]:
    """All that an engine has, the largest first: the others then find memory for their graphs."""
    sizes = [n for n in ROWS if n < config.max_rows] + [config.max_rows]
    found = {
        Bucket(rules, rows, *rest)
        for rules, rows in itertools.product(RULES, sizes)
        for rest in _kinds(config, rows)
    }
    return sorted(found, key=lambda bucket: bucket[1:] + bucket[:1], reverse=True)


def _kinds(config: Resolved, rows: int) -> Iterable[tuple[int, int, int]]:
    """Tokens, passes and pairs: without drafts, with drafts to make, with drafts to judge, too."""
    yield rows, 0, 0
    most = config.num_drafts
    if config.drafts == "none":
        return
    owed = rows * (config.chunk_len - 1)
    widths = [4**n for n in range(1, 4) if 4**n < 1 + most] + [1 + most]
    totals = {min(rows * width, config.max_step_tokens) for width in widths} - {rows}
    if config.drafts == "ngram":
        yield rows, most, 0
        yield from ((tokens, most, 0) for tokens in totals)
        return
    yield rows, 0, rows + owed
    if rows == config.max_step_tokens:  # nothing but drafts for fewer rows
        yield rows, most, rows + owed
    yield from ((tokens, most, pairs) for tokens in totals for pairs in (tokens, tokens + owed))
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


class Fit:
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
    found = GREEDY
    for row in rows:
        rule = row.request.rule
        if rule.edits_logits or rule.params.logprobs is not None or row.request.guide is not None:
            if not RuleTable.holds(rule):
                return -1
            found = ANY
        elif not rule.greedy:
            found = max(found, SORTED if sorts(rule) else DRAWN)
    return found


def pack(plan: Plan, bucket: Bucket, width: int, vocab_size: int, changes: dict[int, int]) -> Fed[np.ndarray]:
    """A plan in a bucket. width: most tokens of a row; changes of the page table, at most num_changes."""
    rows, num = plan.rows, len(plan.rows)
    *shapes, (_, word) = shapes_of(bucket, vocab_size)
    fed = Fed._make([np.zeros(shape, dtype) for shape, dtype in shapes] + [np.zeros((1, 0), word)])
    fed.rows[:num] = known_of(rows)
    num_tokens = fed.rows[:num, 1].astype(np.int64)
    fed.slot[:num], fed.num_drafts[:num] = fed.rows[:num, 3], fed.rows[:num, 2]
    fed.room[:num] = [row.room for row in rows]
    if bucket.is_dense:
        fed.row[:] = fed.line_row[:] = fed.rows[:, 0] = np.arange(bucket.rows)
    else:
        row, offset = ragged(num_tokens)
        fed.row[: len(row)] = fed.line_row[: len(row)] = row
        fed.offset[: len(row)] = fed.line_offset[: len(row)] = offset
        fed.line_offset[len(row) :] = width
    total = int(num_tokens.sum())
    fed.token_slot[:total] = fed.slot[fed.row[:total]]
    for place, change in enumerate(changes.items()):
        fed.changes[place] = change
    if bucket.pairs:
        _pack_pairs(rows, fed)
    return fed._replace(bits=_pack_masks(rows, fed, num_words(vocab_size))) if bucket.rules == ANY else fed


def _pack_masks(rows: list[Row], fed: Fed[np.ndarray], words: int) -> np.ndarray:
    """What grammars allow."""
    bits, end = [np.full(words, 2**32 - 1, np.uint32)], 0
    for row in rows:
        start, end = end, end + row.num_tokens
        if row.request.guide is not None:
            fed.mask[start:end] = range(len(bits), len(bits) + row.num_tokens)
            bits += [mask[:words] for mask in row.request.guide.masks[: row.num_tokens]]
    return np.stack(bits).view(np.int32)


def _pack_pairs(rows: list[Row], fed: Fed[np.ndarray]) -> None:
    """What the head reads: pairs of a row stand together; rows that read nothing have none."""
    num = len(rows)
    owed, counts = counts_of(rows)
    counts = counts * [row.reads for row in rows]
    owed = owed * (counts > 0)
    row, offset = ragged(counts)
    fed.pair_row[: len(row)], fed.pair_slot[: len(row)] = row, fed.slot[row]
    fed.pair_offset[:] = 1
    fed.pair_offset[: len(row)] += offset - owed[row]
    fed.head_rows[:num] = head_rows((fed.slot[:num] * (counts > 0)).tolist(), counts)
    fed.head_rows[:num, 0] *= counts > 0
    fed.last[:num] = fed.head_rows[:num, 0] + owed


def counts_of(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that a head reads: pairs that earlier steps owe, and all pairs."""
    owed = np.array([row.owed for row in rows], np.int64)
    return owed, np.array([row.num_tokens for row in rows], np.int64) + owed


def head_rows(slots: list[int], counts: np.ndarray) -> np.ndarray:
    """Rows of the head [N, 8], without `committed`."""
    rows = np.zeros((len(counts), len(COLUMNS)), np.int32)
    rows[:, 0] = np.cumsum(counts) - counts
    rows[:, 1] = counts
    rows[:, 3] = slots
    return rows
