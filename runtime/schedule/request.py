"""A request under way: its ids, its three lengths, its stop rules."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hemiola.runtime.api import (
    LARGEST_INT,
    FinishReason,
    Logprob,
    Metrics,
    SamplingParams,
    check_word_ids,
)
from hemiola.runtime.cache.tree import Chain
from hemiola.runtime.choose.grammar import Grammar, Guide, Stuck
from hemiola.runtime.choose.rule import Forbidden, Rule, Words
from hemiola.runtime.config import rebuilt_for
from hemiola.runtime.errors import Amount, Name, Refused, Text, shown

Encode = Callable[[str], Sequence[int]]  # text -> token ids, without special ones


@dataclass(eq=False, slots=True)
class Request:
    """Its three lengths: prompt_len <= total_len (ids known), committed_len (tokens whose state is final)."""

    id: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    ids: np.ndarray  # [most that total_len can become] int32: prompt, then output
    prompt_len: int
    total_len: int
    metrics: Metrics
    bad_words: Words = ()
    wants_text: bool = True  # else its pieces have ids alone; stop strings are looked for in any case
    given_len: int = field(init=False)  # total_len when it came: prompt, and output that its caller has
    told_len: int = field(init=False)  # total_len when its last piece left, kept by the outbox
    rule: Rule = field(init=False)
    guide: Guide | None = None  # of a request with a grammar
    committed_len: int = 0
    # the scheduler's
    age: int = 0  # place in the order of arrival
    priority: int = field(init=False)  # as asked, or better: it has waited
    waiting_since: float = 0.0  # by the scheduler's clock; or since its priority was last raised
    waited: float = 0.0  # seconds, when it last got a slot, that raised no priority yet
    chain: Chain = field(init=False)
    slot_id: int = 0  # 0: not running
    hit_len: int = 0  # where it began, when it last got a slot
    load: int = 0  # what comes from the host's memory for it (see Start); 0: nothing, or a step waits for it
    start_len: int = 0  # its total_len then: so much is computed as a prompt
    planned_len: int = 0  # of that, what steps done or under way compute
    edge: int = 0  # its state stands there or further on, as far as is known
    in_flight: int = 0  # steps under way
    ahead: int = 0  # tokens that they may add
    draft_hits: float = 0.0  # what Pace has learned of it
    draft_trials: float = 0.0
    num_drafts: int = 0  # drafts that the next step may verify
    owed: int = 0  # tokens at its end whose pairs a drafting head has not read
    leaving: bool = False  # to be preempted when no step is under way
    starts_anew: bool = False  # leaving, since its prefix is not trusted, nor are steps under way
    # how it ends
    finish_reason: FinishReason | None = None
    error: str | Refused | None = None  # Refused: the caller's fault
    logprobs: list[Logprob] = field(default_factory=list)  # of tokens that have not left, if asked for
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt's, from the second on

    def __post_init__(self) -> None:
        self.priority = self.params.priority
        self.given_len, self.told_len = self.total_len, self.prompt_len
        self.rule = Rule(self.params, self.seed, self.prompt_len, self.stop_ids, self.bad_words)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is better; no two are equal."""
        return self.priority, self.age

    @property
    def most_len(self) -> int:
        """What total_len may be once all steps under way are done."""
        return self.total_len + self.ahead

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are wanted and not known."""
        asked = self.params.prompt_logprobs is not None
        return self.prompt_len - 1 - len(self.prompt_logprobs) if asked else 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Add output tokens up to the first that ends the request; what follows it is dropped."""
        ids, stop_ids = self.ids, self.stop_ids
        for token_id in token_ids:
            ids[self.total_len] = token_id
            self.total_len += 1
            if token_id in stop_ids:
                self.finish_reason = "stop"
                return
            if self.total_len == len(ids):
                self.finish_reason = "length"
                return

    def add_logprobs(self, logprobs: Sequence[Logprob]) -> None:
        """Add those of the tokens that were just appended."""
        self.logprobs.extend(logprobs)
        del self.logprobs[self.total_len - self.told_len :]

    def add_prompt_logprobs(self, position: int, logprobs: Sequence[Logprob]) -> None:
        """Of the tokens from a position of the prompt on; a chunk that runs again brings the same."""
        self.prompt_logprobs[position - 1 : position - 1 + len(logprobs)] = logprobs

    def stop_at(self, total_len: int) -> None:
        """End here because the text up to here holds a stop string."""
        self.total_len = total_len
        self.finish_reason, self.error = "stop", None
        del self.logprobs[total_len - self.told_len :]

    def fail(self, error: str | Refused) -> None:
        self.finish_reason = "error"
        self.error = error


class Bounds(NamedTuple):
    """What a request is checked against."""

    max_len: int
    built_max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def new_request(
    request_id: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    bounds: Bounds,
    encode: Encode | None = None,
    grammar: Grammar | None = None,
    arrival: float | None = None,
    output_ids: Sequence[int] = (),
    wants_text: bool = True,
) -> Request:
    """Check a tokenised prompt. Raises Refused; nothing has been queued then. encode: for bad_words.
    output_ids: the output so far, of a request that goes on."""
    prompt_len = len(prompt_ids)
    known_ids = checked_ids(prompt_ids, bounds)
    ids = np.zeros(min(prompt_len + params.max_tokens, bounds.max_len), np.int32)
    ids[:prompt_len] = known_ids
    _check_ids("stop_token_ids", params.stop_token_ids, bounds)
    _check_ids("logit_bias", params.logit_bias, bounds)
    for word in params.bad_words_ids:
        _check_ids("bad_words_ids", word, bounds)
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else bounds.eos_ids)
    if not isinstance(output_ids, Sequence) or isinstance(output_ids, (str, bytes)):
        raise Refused("wrong_type", "output_ids", type(output_ids), way_out="pass a list of token ids (int)")
    if output_ids:
        _continue(ids, prompt_len, output_ids, stop_ids, bounds)
    bad_words = _bad_words(params, encode)
    request = Request(
        id=request_id,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        stop_ids=stop_ids,
        ids=ids,
        prompt_len=prompt_len,
        total_len=prompt_len + len(output_ids),
        metrics=Metrics(
            num_prompt_tokens=prompt_len, arrival=time.perf_counter() if arrival is None else arrival
        ),
        bad_words=bad_words,
        wants_text=wants_text,
    )
    _check_a_token_is_left(request.rule, bounds.vocab_size)
    if grammar is not None:
        request.guide = _guide(grammar, request)
    return request


def _continue(
    ids: np.ndarray, prompt_len: int, output_ids: Sequence[int], stop_ids: frozenset[int], bounds: Bounds
) -> None:
    if not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in output_ids):
        message = (Name("output_ids"), f" is a list of {_kinds(output_ids)}")
        raise Refused("wrong_type", "output_ids", message=message, way_out="pass token ids (int)")
    max_tokens = len(ids) - prompt_len
    way_out = "the request has ended"
    if len(output_ids) >= max_tokens:
        limit = f"of {max_tokens} that the output may have"
        raise Refused("too_long", "output_ids", Amount(len(output_ids), "tokens"), limit, way_out)
    for token_id in stop_ids.intersection(output_ids):
        message = (Name("output_ids"), f" holds the end token {token_id}")
        raise Refused("conflict", "output_ids", message=message, way_out=way_out)
    _check_ids("output_ids", output_ids, bounds)
    ids[prompt_len : prompt_len + len(output_ids)] = output_ids


def checked_ids(prompt_ids: Sequence[int], bounds: Bounds) -> np.ndarray:
    """[T] int32. Raises Refused."""
    if len(prompt_ids) == 0:
        raise Refused("out_of_range", "prompt", message="prompt is empty", way_out="give at least one token")
    if len(prompt_ids) >= bounds.max_len:
        raise _too_long(len(prompt_ids), bounds)
    return _checked_ids(prompt_ids, bounds.vocab_size).astype(np.int32)


def _check_a_token_is_left(rule: Rule, vocab_size: int) -> None:
    """Behind any text, as far as bad words and min_tokens decide."""
    if len(rule.bad_words) + len(rule.lists.stops) < vocab_size:
        return
    forbidden = Forbidden(rule.lists, rule.bad_words, LARGEST_INT)
    for behind in {(), *(word[:-1] for word in rule.bad_words)}:
        if len(np.unique(forbidden(behind))) >= vocab_size:
            where = f" behind {shown(list(behind))}" if behind else ""
            message = f"bad words, and stop ids before min_tokens, forbid all {vocab_size} tokens{where}"
            raise Refused("conflict", "bad_words", message=message, way_out="leave one")


def _guide(grammar: Grammar, request: Request) -> Guide:
    if not request.stop_ids:
        message = (Name("structured_outputs"), " must be able to end, but no token ends this request")
        way_out = ("drop ", Name("ignore_eos"), ", or give ", Name("stop_token_ids"))
        raise Refused("conflict", "structured_outputs", message=message, way_out=way_out)
    rule = request.rule
    forbidden = Forbidden(rule.lists, rule.bad_words, rule.params.min_tokens)
    guide = Guide(grammar, rule.prompt_len, rule.stop_ids, forbidden)
    try:
        guide.resume(request.ids[request.prompt_len : request.total_len].tolist())
        guide.follow(request.ids[: request.total_len])
    except Stuck as stuck:
        raise refused_by_grammar(stuck) from None
    return guide


def refused_by_grammar(stuck: Stuck) -> Refused:
    """The grammar, the vocabulary and the other options leave no token: nothing has failed."""
    message = (Name("structured_outputs"), f": {stuck}")
    return Refused("conflict", "structured_outputs", message=message, way_out="change one of them")


def _check_ids(name: str, token_ids: Iterable[int], bounds: Bounds) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < bounds.vocab_size:
            message = (Name(name), f" holds {shown(token_id)}, the vocabulary is 0..{bounds.vocab_size - 1}")
            raise Refused("out_of_range", name, message=message, way_out="remove it")


def _bad_words(params: SamplingParams, encode: Encode | None) -> Words:
    """Token ids of the bad words, each as it is spelt at the beginning of a text and after a space."""
    words = list(params.bad_words_ids)
    for text in params.bad_words:
        if encode is None:
            message = (Name("bad_words"), " is text, the engine has no tokenizer")
            raise Refused(
                "unsupported", "bad_words", message=message, way_out=("pass ", Name("bad_words_ids"))
            )
        bare = text.lstrip(" ")
        spellings = [tuple(encode(spelling)) for spelling in ((bare, f" {bare}") if bare else (text,))]
        if not all(spellings):
            message = (Name("bad_words"), f" holds {text!r}, which has no tokens in this tokenizer")
            raise Refused("out_of_range", "bad_words", message=message, way_out="remove it")
        words += spellings
    word_ids = tuple(dict.fromkeys(words))
    check_word_ids("bad_words" if params.bad_words else "bad_words_ids", word_ids)
    return word_ids


def _too_long(prompt_len: int, bounds: Bounds) -> Refused:
    message = f"prompt is {prompt_len} tokens, max_len={bounds.max_len} must hold it and at least one more"
    way_out: Text = f"shorten it or {rebuilt_for(prompt_len + 1)}"
    if bounds.max_len < bounds.built_max_len and prompt_len < bounds.built_max_len:
        way_out = ("shorten it or start with ", Name("max_len", prompt_len + 1))
    return Refused("too_long", "prompt", prompt_len, message=message, way_out=way_out)


def _checked_ids(prompt_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(prompt_ids)
    except ValueError:
        ids = np.empty(0)
    if not np.issubdtype(ids.dtype, np.integer) and {type(value) for value in prompt_ids} == {int}:
        ids = np.array(prompt_ids, object)  # some need more than 64 bits
    elif ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        message = f"prompt is a list of {_kinds(prompt_ids)}"
        raise Refused(
            "wrong_type", "prompt", message=message, way_out="pass text or a list of token ids (int)"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at, known = outside[0], f"0..{vocab_size - 1}"
        raise bad_id(int(ids[at]), at, known)
    return ids


def bad_id(token_id: int, at: int, known: str) -> Refused:
    message = f"token id {shown(token_id)} at position {at} of the prompt is not in the vocabulary {known}"
    return Refused("out_of_range", "prompt", token_id, message=message)


def _kinds(values: Sequence[object]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))
