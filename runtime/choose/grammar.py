"""Grammars: which tokens may come next, so that a text becomes what `structured_outputs` asks for.

The law: each token of a request with a grammar leaves a text that some continuation completes; an end token
is allowed where the text is complete, and nowhere else. What is allowed is a function of the request's tokens
alone, in a drafted step too: a token behind a draft is chosen with the grammar's state behind that draft, and
drafts that the grammar forbids are dropped before the step.

Compiling happens in threads of its own, at submit, and is bounded in size and time: a process of its own
compiles each grammar first (trial.py). llguidance does the parsing, token by token, without tables of the
whole grammar; its own limits bound a step.
"""

import functools
import json
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import AddedToken, Tokenizer

from hemiola.runtime.api import MAX_GRAMMAR, StructuredOutputsParams
from hemiola.runtime.choose.trial import Trial, TrialLimits
from hemiola.runtime.errors import Busy, Refused

MOST_SECONDS = 10.0  # that a request waits for its grammar
NAME = "structured_outputs"
MOST_KEPT = 64  # compiled grammars
NUM_THREADS = 2
AT_ONCE = 64  # tokens that a parser reads with Python's lock held: a dear grammar takes a millisecond each
MOST_AGAIN_S = 0.25  # of the loop's thread, in which a text is read again
MOST_COPY_S = 0.002  # the same, in which a matcher is copied for drafts: it takes longer with each token
MOST_DEAR = 8  # copies in a row that took longer: a single one may be the machine's
TRIAL_LIMITS = TrialLimits()
SHOWN = 300  # characters of a message
DEAD_END = "no token goes on from here"
QUOTED = re.compile(r"\s*(\d+ \||\^|<non-verbose/>)")
END = "<|end of the grammar|>"  # our own token, behind the tokenizer's
PLACE = "at 1(8): "  # behind "start: "
OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # any token that fits, not only the tokenizer's favourite
# Regexes whose tokens are allowed as a whole where a grammar allows all that they match. The library's own
# know strings of up to 10 and 30 characters; with more, a mask within a string with maxLength takes a sixth.
STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{STRING}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 14, 20, 30)), f"{STRING}+"]
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Stuck(Exception):
    """A text that its grammar does not let go on; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """An engine's tokens, as grammars see them."""

    tokenizer: LLTokenizer
    num_words: int  # of a mask
    num_real: int  # ids that an engine may choose: those below


@dataclass(slots=True, eq=False)
class Grammar:
    """A compiled grammar; every request starts a copy of `matcher`.

    Copies share the library's lexer: what one has found out the others know, and its limit is one for all.
    When they have used it up, `matcher` becomes one with a lexer of its own, for all who come then: parsing a
    long grammar takes a second, and all requests wait for it.
    """

    vocabulary: Vocabulary
    source: str
    matcher: LLMatcher

    def again(self, used_up: LLMatcher) -> LLMatcher:
        """One that does not share the lexer of this one."""
        if self.matcher is used_up:
            self.matcher = _matcher(self.vocabulary, self.source)
        return self.matcher


class Grammars:
    """Compiles grammars for one engine, each content once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._make_vocabulary = functools.partial(make_vocabulary, tokenizer, vocab_size)
        self._vocabulary: Future[Vocabulary] | None = None  # when it is needed: it takes a second or two
        self._lock = Lock()
        self._kept: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hemiola-grammar")
        self._trials: SimpleQueue[Trial] = SimpleQueue()  # one for each of the threads
        trials = [Trial(tokenizer.to_str(), vocab_size, TRIAL_LIMITS) for _ in range(NUM_THREADS)]
        for trial in trials:
            self._trials.put(trial)
        self._all_trials = trials
        self._is_closed = False

    def close(self) -> None:
        """End the processes and the threads. Who waits for a grammar is refused. Safe to call twice."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._all_trials:
            trial.close()

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        """Wait for it, MOST_SECONDS at most.

        Raises Refused if it is wrong, too large, or cannot be met; Busy if it waited for other grammars.
        """
        try:
            return self._wait(asked)
        except Refused as error:
            error.__traceback__ = None  # it may be kept, and would keep the frames of all who are told it
            raise error.under("structured_outputs") from None

    def _wait(self, asked: StructuredOutputsParams) -> Grammar:
        _check_size(asked)
        end = time.monotonic() + MOST_SECONDS
        with self._lock:
            self._check_open()
            self._vocabulary = self._vocabulary or self._threads.submit(self._make_vocabulary)
        try:
            vocabulary = self._vocabulary.result(MOST_SECONDS)
        except TimeoutError:
            raise _too_slow() from None
        except CancelledError:
            raise _closed() from None
        while True:
            compiling = self._compiling(vocabulary, asked)
            try:
                return compiling.result(max(0.0, end - time.monotonic()))
            except CancelledError:  # by another who asked for it, and had waited long enough; or closed
                continue
            except TimeoutError:
                break
        if not self._give_up(asked, compiling):
            raise _too_slow()
        said = f"grammars of other requests took {MOST_SECONDS:.0f} s to compile"
        raise Busy(f"{said}; try again in 1 s")

    def _give_up(self, asked: StructuredOutputsParams, compiling: "Future[Grammar]") -> bool:
        """Cancel it, unless it is being compiled."""
        with self._lock:
            self._check_open()
            is_cancelled = compiling.cancel()
            if is_cancelled and self._kept.get(asked) is compiling:
                del self._kept[asked]
            return is_cancelled

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _compiling(self, vocabulary: Vocabulary, asked: StructuredOutputsParams) -> "Future[Grammar]":
        with self._lock:
            self._check_open()
            future = self._kept.get(asked)
            if future is None:
                future = self._kept[asked] = self._threads.submit(self._compile, vocabulary, asked)
            self._kept.move_to_end(asked)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return future

    def _compile(self, vocabulary: Vocabulary, asked: StructuredOutputsParams) -> Grammar:
        try:
            return self._try(vocabulary, asked)
        except Refused:
            raise
        except BaseException:  # which says nothing of the grammar: the next request tries again
            with self._lock:
                self._kept.pop(asked, None)
            raise

    def _try(self, vocabulary: Vocabulary, asked: StructuredOutputsParams) -> Grammar:
        trial = self._trials.get()
        try:
            passes = trial.passes(asked.model_dump_json(exclude_defaults=True, by_alias=True))
        finally:
            self._trials.put(trial)
        self._check_open()
        if not passes:
            seconds, num_bytes = TRIAL_LIMITS
            message = (
                f"it was not compiled within {seconds:g} s of a processor and {num_bytes >> 20} MiB,"
                " or is nested too deeply"
            )
            raise Refused("too_long", message=message, way_out="simplify it")
        return compile_grammar(vocabulary, asked)


def _closed() -> Refused:
    return Refused("closed", message="the engine is closed", way_out="open it again")


def _too_slow() -> Refused:
    message = f"it was not compiled within {MOST_SECONDS:.0f} s"
    return Refused("too_long", message=message, way_out="simplify it, or try again later")


def _check_size(asked: StructuredOutputsParams) -> None:
    """Before it is kept, and a thread takes it up."""
    size = len(asked.model_dump_json(exclude_defaults=True))
    if size > MAX_GRAMMAR:
        message = f"{size} characters are too many, the limit is {MAX_GRAMMAR}"
        raise Refused("too_long", message=message, way_out="shorten it")


def compile_grammar(vocabulary: Vocabulary, asked: StructuredOutputsParams) -> Grammar:
    source = to_lark(asked)
    matcher = _matcher(vocabulary, source)
    if matcher.is_error():
        reason = _reason(matcher)
        where = "" if asked.grammar is not None else PLACE  # in what we have made of the others
        raise Refused("malformed", message=reason.removeprefix(where), way_out="correct it")
    try:
        allowed(vocabulary, matcher, np.array([0]))
    except Stuck as stuck:
        if str(stuck) == DEAD_END:
            raise Refused("malformed", message=f"no text fits it ({stuck})", way_out="correct it") from None
        raise Refused("too_long", message=f"it is too large ({stuck})", way_out="simplify it") from None
    return Grammar(vocabulary, source, matcher)


def _matcher(vocabulary: Vocabulary, source: str) -> LLMatcher:
    return LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=LIMITS)


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """With one more token, which no engine chooses: by it the library marks where a text may end."""
    longer: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    end_id = longer.get_vocab_size(with_added_tokens=True)
    longer.add_special_tokens([AddedToken(END, normalized=False)])
    try:
        made = LLTokenizer(longer.to_str(), eos_token=end_id, n_vocab=end_id + 1, slices=SLICES)
    except ValueError as error:
        message = f"grammars read tokenizers of bytes only, not this engine's ({_one_line(str(error))})"
        raise Refused("unsupported", message=message, way_out="leave it out") from None
    return Vocabulary(made, -(-max(vocab_size, made.vocab_size) // 32), min(vocab_size, end_id))


def to_lark(asked: StructuredOutputsParams) -> str:
    """All kinds as one: the library's variant of Lark."""
    if asked.json_schema is not None:
        text = f"start: %json {asked.json_schema}"
    elif asked.json_object:
        text = 'start: %json {"type": "object"}'
    elif asked.regex is not None:
        text = f"start: /{regex_to_lark(asked.regex, '')}/"
    elif asked.choice is not None:
        text = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, asked.choice))}"
    else:
        try:
            text = any_to_lark(asked.grammar or "")
        except RecursionError:
            message = "grammar is nested too deeply"
            raise Refused("too_long", message=message, way_out="give names to its parts") from None
        except Exception as error:  # the converter raises bare Exception
            message = f"grammar is no GBNF ({_one_line(str(error))})"
            raise Refused("malformed", message=message, way_out="correct it") from None
    return text + OPTIONS


def _reason(matcher: LLMatcher) -> str:
    return _one_line(matcher.get_error())


def _one_line(error: str) -> str:
    """Without the source that a message quotes below itself."""
    lines = [line.strip() for line in error.splitlines() if not QUOTED.match(line)]
    text = " ".join(line for line in lines if line)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def allowed(vocabulary: Vocabulary, matcher: LLMatcher, end_ids: np.ndarray) -> np.ndarray:
    """Bits [words] uint32 of the tokens that may come next. Raises Stuck if there are none."""
    bits = np.empty(vocabulary.num_words, np.uint32)
    num_bytes = -(-vocabulary.tokenizer.vocab_size // 32) * 4
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, num_bytes)
    if matcher.is_error():
        reason = _reason(matcher)
        is_dead_end = "NoExtensionBias" in (matcher.stop_reason(), reason)
        raise Stuck(DEAD_END if is_dead_end else reason)
    word, place = divmod(vocabulary.num_real, 32)
    bits[word] &= np.uint32((1 << place) - 1)
    bits[word + 1 :] = 0
    if matcher.is_accepting():
        np.bitwise_or.at(bits, end_ids >> 5, _bit(end_ids))
    if not bits.any():
        raise Stuck(DEAD_END)
    return bits


class Guide:
    """Where a request's text stands in its grammar. Only one thread may ask it: at last, the loop's."""

    def __init__(
        self,
        grammar: Grammar,
        prompt_len: int,
        end_ids: frozenset[int],
        forbids: Callable[[Sequence[int]], np.ndarray],  # ids that other options forbid behind an output
    ) -> None:
        self._grammar = grammar
        self._source = grammar.matcher  # with which it shares a lexer
        self._matcher = self._source.deep_copy()
        self._prompt_len, self._end_ids, self._forbids = prompt_len, end_ids, forbids
        self._ends = np.fromiter(end_ids, np.int64)
        self._output: list[int] = []  # what the grammar has read
        self._num_dear = 0  # of the last copies for drafts
        self.masks: list[np.ndarray] = []  # of the next token, and of the one behind each draft

    def resume(self, output: Sequence[int]) -> None:
        """An output that the same grammar led to elsewhere; before `follow`. Raises Stuck if it cannot be."""
        self._output += output
        _read(self._matcher, self._output)
        if _may_begin_again(self._matcher):
            self._copy_another()
        if self._matcher.is_error():
            raise Stuck("the output so far does not fit")

    def follow(self, ids: np.ndarray, drafts: Sequence[int] = ()) -> int:
        """Read what is new in a text, and look ahead; returns how many of the drafts may stay.

        Raises Stuck if nothing may follow the text. Where nothing may follow a draft, that draft goes: the
        same token can still be chosen, and the request then ends as it does without drafts.
        """
        new = ids[self._prompt_len + len(self._output) :].tolist()
        assert len(new) <= len(self.masks), "a text ran ahead of its grammar"
        for token_id, bits in zip(new, self.masks, strict=False):
            if not _holds(bits, token_id):
                raise Stuck(f"token {token_id} does not fit: other options left no token that does")
            self._output.append(token_id)
        self._matcher.consume_tokens(new)
        try:
            self.masks = [self._mask(self._matcher, self._output)]
        except Stuck:
            if not _may_begin_again(self._matcher):
                raise
            self._begin_again()  # others may have used up what they share
        if drafts and self._num_dear < MOST_DEAR:
            self._look_ahead(drafts)
        return len(self.masks) - 1

    def _begin_again(self) -> None:
        """With the lexer that others have by now, and if that is used up, too, with a new one."""
        for is_last in (self._grammar.matcher is self._source, True):
            self._copy_another()
            try:
                self.masks = [self._mask(self._matcher, self._output)]
                return
            except Stuck:
                if is_last or not _may_begin_again(self._matcher):
                    raise

    def _copy_another(self) -> None:
        """A matcher that does not share the lexer of the last one, behind the output. Raises Stuck if reading
        that takes too long: all who shared the lexer may do so in one step."""
        self._source = self._grammar.again(self._source)
        self._matcher = self._source.deep_copy()
        _read(self._matcher, self._output, MOST_AGAIN_S)

    def _look_ahead(self, drafts: Sequence[int]) -> None:
        begun = time.thread_time()
        matcher, output_len = self._matcher.deep_copy(), len(self._output)
        is_dear = time.thread_time() - begun > MOST_COPY_S
        self._num_dear = self._num_dear + 1 if is_dear else 0
        for draft in drafts:
            if draft in self._end_ids or not matcher.consume_token(draft):
                break
            self._output.append(draft)  # and taken away again: to copy all would take ever longer
            try:
                self.masks.append(self._mask(matcher, self._output))
            except Stuck:
                break
        del self._output[output_len:]

    def _mask(self, matcher: LLMatcher, output: Sequence[int]) -> np.ndarray:
        bits = allowed(self._grammar.vocabulary, matcher, self._ends)
        forbidden = self._forbids(output)
        np.bitwise_and.at(bits, forbidden >> 5, ~_bit(forbidden))
        if len(forbidden) and not bits.any():
            raise Stuck("min_tokens and bad words leave no token that the grammar allows")
        return bits


def _read(matcher: LLMatcher, output: list[int], seconds: float = math.inf) -> None:
    """An output, from its beginning. Raises Stuck if that takes more seconds of a processor."""
    end = time.thread_time() + seconds
    for first in range(0, len(output), AT_ONCE):
        if time.thread_time() > end:
            raise Stuck(f"its lexer is used up, and reading the text again takes more than {seconds:g} s")
        matcher.consume_tokens(output[first : first + AT_ONCE])


def _may_begin_again(matcher: LLMatcher) -> bool:
    """Whether something has failed that it shares. Its parser is its own, and would fail on the same text."""
    return matcher.is_error() and not matcher.get_error().startswith("Parser Error")


def _bit(token_ids: np.ndarray) -> np.ndarray:
    """Of each id, in its word of a mask."""
    return np.left_shift(np.uint32(1), (token_ids & 31).astype(np.uint32))


def _holds(bits: np.ndarray, token_id: int) -> bool:
    return bool(bits[token_id >> 5] >> (token_id & 31) & 1)
