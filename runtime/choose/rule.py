"""What a request's rule says, as arrays: made once, when the request opens, and in its caller's thread.

So what cannot be made is its caller's error, and a step only puts arrays of known types together.

A bad word stands here as its last token and, one entry each, the tokens before it. So a line of logits costs
as many comparisons as there are tokens in all words, whatever their number and lengths.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hemiola.plugins.step.draw.reference import ALL, NO_TOP_P, WORD
from hemiola.plugins.step.edit.reference import LARGEST
from hemiola.runtime.api import SamplingParams

SMALLEST = float(np.finfo(np.float32).tiny)
Words = tuple[tuple[int, ...], ...]
NOTHING = np.empty(0, np.int32)


class Numbers(NamedTuple):
    """One of each, in any rule."""

    floats: np.ndarray  # [3] fp64: temperature, min_p, top_p
    whole: np.ndarray  # [5] int64: top_k, the seed's low and high word, prompt_len, min_tokens
    penalties: np.ndarray  # [3] fp32: repetition, frequency, presence


def numbers_of(params: SamplingParams, seed: int, prompt_len: int) -> Numbers:
    """Of a greedy rule top_k is -1, which no other has; it draws from nothing."""
    greedy = params.temperature == 0
    top_p = params.top_p if params.top_p < 1 else NO_TOP_P
    floats = (1.0, 0.0, NO_TOP_P) if greedy else (params.temperature, params.min_p, top_p)
    top_k = -1 if greedy else params.top_k or ALL
    repetition = min(max(params.repetition_penalty, SMALLEST), LARGEST)
    return Numbers(
        np.array(floats, np.float64),
        np.array((top_k, seed & WORD, seed >> 32, prompt_len, params.min_tokens), np.int64),
        np.array((repetition, params.frequency_penalty, params.presence_penalty), np.float32),
    )


class Sizes(NamedTuple):
    """How long the lists of a rule are."""

    stops: int
    biases: int
    words: int
    before: int

    @property
    def width(self) -> int:
        """Numbers of a line that holds such lists."""
        return self.stops + 2 * self.biases + self.words + 3 * self.before


class Lists(NamedTuple):
    """All int32."""

    stops: np.ndarray  # [A] ids that min_tokens forbids
    biased: np.ndarray  # [D] ids
    biases: np.ndarray  # [D] what their logits get added: the bits of fp32
    lasts: np.ndarray  # [B] of each bad word
    before: np.ndarray  # [E] the tokens before it
    back: np.ndarray  # [E] how far before it
    word: np.ndarray  # [E] of which word

    @property
    def sizes(self) -> Sizes:
        return Sizes(len(self.stops), len(self.biased), len(self.lasts), len(self.before))

    def line(self, sizes: Sizes) -> np.ndarray:
        """All of them [width], filled up to these sizes with what changes nothing."""
        stops, biases, words, before = sizes
        widths = (stops, biases, biases, words, before, before, before)
        parts = zip(self, widths, (-1, -1, 0, -1, -1, 1, 0), strict=True)
        return np.concatenate([_filled(values, width, rest) for values, width, rest in parts])


def lists_of(stop_ids: Collection[int], bias: Mapping[int, float], words: Words) -> Lists:
    """stop_ids: those that min_tokens forbids."""
    biases = np.clip(np.array(list(bias.values()), np.float64), -LARGEST, LARGEST).astype(np.float32)
    entries = [
        (token_id, len(before) - place, number)
        for number, (*before, _) in enumerate(words)
        for place, token_id in enumerate(before)
    ]
    before, back, word = np.array(entries, np.int32).reshape(-1, 3).T
    return Lists(
        stops=_ids(sorted(stop_ids)),
        biased=_ids(bias),
        biases=biases.view(np.int32),
        lasts=_ids([word[-1] for word in words]),
        before=np.ascontiguousarray(before),
        back=np.ascontiguousarray(back),
        word=np.ascontiguousarray(word),
    )


def _ids(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)


def _filled(values: np.ndarray, width: int, rest: int) -> np.ndarray:
    if len(values) == width:
        return values
    line = np.full(width, rest, np.int32)
    line[: len(values)] = values
    return line


class Forbidden:
    """Ids that bad words and min_tokens forbid behind an output: on the host what sampling.py is on a GPU."""

    def __init__(self, lists: Lists, words: Words, min_tokens: int) -> None:
        self._stops, self._min_tokens = lists.stops, min_tokens
        lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            lasts.setdefault(tuple(before), []).append(last)
        self._lasts = {before: _ids(ids) for before, ids in lasts.items()}
        self._lens = sorted(set(map(len, lasts)))

    def __call__(self, output: Sequence[int]) -> np.ndarray:
        forbidden = [self._stops] if len(output) < self._min_tokens else []
        for length in self._lens:  # together no more tokens than the words have
            if length > len(output):
                break
            ids = self._lasts.get(tuple(output[len(output) - length :]))
            if ids is not None:
                forbidden.append(ids)
        return np.concatenate(forbidden) if forbidden else NOTHING


@dataclass(frozen=True, eq=False, slots=True)
class Rule:
    """What decides a request's tokens besides the logits and the tokens before."""

    params: SamplingParams
    seed: int
    prompt_len: int
    stop_ids: frozenset[int]
    bad_words: Words = ()
    numbers: Numbers = field(init=False)
    lists: Lists = field(init=False)
    greedy: bool = field(init=False)
    edits_logits: bool = field(init=False)  # the logits are changed before a token is chosen
    plain: bool = field(init=False)  # the best token, and nothing else is asked

    def __post_init__(self) -> None:
        params = self.params
        stop_ids = self.stop_ids if params.min_tokens else ()
        object.__setattr__(self, "numbers", numbers_of(params, self.seed, self.prompt_len))
        object.__setattr__(self, "lists", lists_of(stop_ids, params.logit_bias, self.bad_words))
        penalties = (params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
        edits = any(penalties) or bool(params.logit_bias or self.bad_words)
        object.__setattr__(self, "greedy", params.temperature == 0)
        object.__setattr__(self, "edits_logits", edits or (params.min_tokens > 0 and bool(self.stop_ids)))
        plain = self.greedy and not self.edits_logits and params.logprobs is None
        object.__setattr__(self, "plain", plain)
