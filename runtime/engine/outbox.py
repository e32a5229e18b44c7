"""Turns a request's new ids into pieces for its user. Only here may text (a stop string) end a request."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from hemiola.runtime.api import OnPiece, Piece
from hemiola.runtime.engine.request import Request
from hemiola.runtime.engine.step import Plan
from hemiola.runtime.text import Growing, Text


class Event(NamedTuple):
    """A piece on its way."""

    request: Request
    piece: Piece
    on_piece: OnPiece


@dataclass(slots=True)
class _Letter:
    request: Request
    on_piece: OnPiece
    growing: Growing | None  # None: an engine without a tokenizer
    sent_len: int  # ids that left already, prompt included


class Outbox:
    """Owns the text of every request from `open` until its last piece."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._letters: dict[int, _Letter] = {}

    def open(self, request: Request, on_piece: OnPiece) -> None:
        """A request whose prompt the tokenizer cannot decode fails here; `end` has its last piece."""
        prompt, growing = request.ids[: request.prompt_len].tolist(), None
        try:
            if self._text is not None:
                growing = Growing(self._text, prompt, request.params.stop)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            _fail(request, error)
        self._letters[request.id] = _Letter(request, on_piece, growing, request.prompt_len)

    def get(self, request_id: int) -> Request | None:
        letter = self._letters.get(request_id)
        return letter and letter.request

    def all(self) -> list[Request]:
        return [letter.request for letter in self._letters.values()]

    def drain(self, plan: Plan) -> list[Event]:
        """The new tokens of a step's rows. A stop string in their text finishes a request."""
        now = time.perf_counter()
        events = []
        for row in plan.rows:
            request = row.request
            letter = self._letters.get(request.id)
            if letter is None:
                continue  # it ended while the step was under way
            if request.total_len > letter.sent_len or request.finish_reason is not None:
                events.append(self._write(letter, now))
        return events

    def end(self, request: Request) -> Event:
        """The last piece of a request that was finished between two steps."""
        return self._write(self._letters[request.id], time.perf_counter())

    def _write(self, letter: _Letter, now: float) -> Event:
        request = letter.request
        try:
            text = _new_text(letter, request.ids[letter.sent_len : request.total_len].tolist())
        except BaseException as error:
            text = ""
            _fail(request, error)
        token_ids = request.ids[letter.sent_len : request.total_len].tolist()
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = request.logprobs[letter.sent_len - request.prompt_len :]
        if token_ids:
            _count(request, now)
        letter.sent_len = request.total_len
        if request.finish_reason is None:
            return Event(request, Piece(text, token_ids, logprobs), letter.on_piece)
        del self._letters[request.id]
        piece = Piece(text, token_ids, logprobs, request.finish_reason, request.metrics, request.error)
        return Event(request, piece, letter.on_piece)


def _fail(request: Request, error: BaseException) -> None:
    """What a tokenizer raises may not take the other requests along."""
    request.fail(f"the tokenizer failed: {type(error).__name__}: {error}")


def _new_text(letter: _Letter, token_ids: list[int]) -> str:
    request, growing = letter.request, letter.growing
    if growing is None:
        return ""
    text = ""
    for at, token_id in enumerate(token_ids):
        if token_id in request.stop_ids:  # it ends the text and is no part of it
            break
        num_before = letter.sent_len + at - request.prompt_len
        text += growing.push(token_id, may_stop=num_before >= request.params.min_tokens)
        if growing.stopped:
            request.stop_at(letter.sent_len + at + 1)
            break
    return text if request.finish_reason is None else text + growing.finish()


def _count(request: Request, now: float) -> None:
    metrics = request.metrics
    metrics.first_token = metrics.first_token or now
    metrics.last_token = now
    metrics.num_output_tokens = request.total_len - request.prompt_len
