"""A request: its ids, its three lengths, its stop rules; and what users put in and get out."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from hemiola.runtime.config import Options
from hemiola.runtime.errors import Refused
from hemiola.runtime.metrics import Metrics

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(Options):
    """How one request's tokens are chosen and when it ends. Greedy unless a temperature is given."""

    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: all")
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: tuple[str, ...] = Field(default=(), description="the text ends before the first of these")
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="also report this many best tokens per position"
    )

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text at once; leave it out")
        return value


class Logprob(NamedTuple):
    """Raw log-softmax (before temperature and filters) of a chosen token, and of the best ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token_id, logprob), best first


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a request. The last piece has a finish_reason and metrics."""

    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    error: str | None = None  # why, when finish_reason is "error"


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[Logprob] | None
    metrics: Metrics
    error: str | None = None


OnPiece = Callable[[Piece], None]


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
    committed_len: int = 0
    drafts: list[int] = field(default_factory=list)  # proposed to follow the total_len known ids
    slot_id: int = 0  # 0: not running
    age: int = 0  # place in the order of arrival, given by the scheduler
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)  # of the output tokens, if asked for

    def append(self, token_ids: Sequence[int]) -> None:
        """Add output tokens up to the first that ends the request; what follows it is dropped."""
        for token_id in token_ids:
            self.ids[self.total_len] = token_id
            self.total_len += 1
            if token_id in self.stop_ids:
                self.finish_reason = "stop"
                return
            if self.total_len == len(self.ids):
                self.finish_reason = "length"
                return

    def add_logprobs(self, logprobs: Sequence[Logprob]) -> None:
        """Of the tokens just appended."""
        self.logprobs.extend(logprobs)
        del self.logprobs[self.total_len - self.prompt_len :]

    def stop_at(self, total_len: int) -> None:
        """End here because the text up to here holds a stop string."""
        self.total_len = total_len
        self.finish_reason = "stop"
        del self.logprobs[total_len - self.prompt_len :]

    def fail(self, error: str) -> None:
        self.finish_reason = "error"
        self.error = error


class Bounds(NamedTuple):
    """What a request is checked against."""

    max_len: int
    built_max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def new_request(
    request_id: int, prompt_ids: Sequence[int], params: SamplingParams, bounds: Bounds
) -> Request:
    """Check a tokenised prompt. Raises Refused; nothing has been queued then."""
    prompt_len = len(prompt_ids)
    if prompt_len == 0:
        raise Refused("prompt is empty; give at least one token")
    if prompt_len >= bounds.max_len:
        raise Refused(_too_long(prompt_len, bounds))
    ids = np.zeros(min(prompt_len + params.max_tokens, bounds.max_len), np.int32)
    ids[:prompt_len] = _checked_ids(prompt_ids, bounds.vocab_size)
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < bounds.vocab_size:
            raise Refused(
                f"stop_token_ids holds {token_id}, the vocabulary is 0..{bounds.vocab_size - 1}; remove it"
            )
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else bounds.eos_ids)
    return Request(
        id=request_id,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        stop_ids=stop_ids,
        ids=ids,
        prompt_len=prompt_len,
        total_len=prompt_len,
        metrics=Metrics(num_prompt_tokens=prompt_len, arrival=time.perf_counter()),
    )


def _too_long(prompt_len: int, bounds: Bounds) -> str:
    room = f"prompt is {prompt_len} tokens, max_len={bounds.max_len} must hold it and at least one more"
    if bounds.max_len < bounds.built_max_len and prompt_len < bounds.built_max_len:
        return f"{room}; shorten it or start with max_len={prompt_len + 1}"
    return f"{room}; shorten it or rebuild with --max-len {prompt_len + 1}"


def _checked_ids(prompt_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, OverflowError):
        ids = np.empty(0, object)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise Refused(f"prompt is a list of {_kinds(prompt_ids)}; pass text or a list of token ids (int)")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = outside[0]
        raise Refused(
            f"token id {ids[at]} at position {at} of the prompt is not in the vocabulary 0..{vocab_size - 1}"
        )
    return ids


def _kinds(values: Sequence[object]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))
