"""Turns a request's new ids into pieces for its user. Only here may text (a stop string) end a request."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from hemiola.runtime.api import OnPiece, Piece
from hemiola.runtime.errors import Refused
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.schedule.request import Request
from hemiola.runtime.text import Growing, Text


class Event(NamedTuple):
    """A piece on its way."""

    request: Request
    piece: Piece
    on_piece: OnPiece


@dataclass(slots=True)
class Letter:
    """What is said of a request."""

    request: Request
    on_piece: OnPiece
    growing: Growing | None  # None: an engine without a tokenizer, or nobody wants the text


class Outbox:
    """Owns the text of every request from `open` until its last piece; but for `letter`, one thread's."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._letters: dict[int, Letter] = {}

    def letter(self, request: Request, on_piece: OnPiece) -> Letter:
        """Of a request to come, in any thread: the text of a long output takes a second. One whose prompt the
        tokenizer cannot decode fails here; once it is open, `end` has its last piece."""
        letter, stop = Letter(request, on_piece, None), request.params.stop
        try:
            if self._text is not None and (request.wants_text or stop):
                letter.growing = Growing(self._text, request.ids[: request.prompt_len].tolist(), stop)
            # of the output that its caller has: its text left before, but for the end that was held back
            _new_text(letter, request.ids[request.prompt_len : request.given_len].tolist())
        except (KeyboardInterrupt, SystemExit):  # of who submits
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            _fail(request, error)
        request.told_len = request.given_len
        request.metrics.num_output_tokens = request.given_len - request.prompt_len  # if no more come
        return letter

    def open(self, letter: Letter) -> None:
        self._letters[letter.request.id] = letter

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
            if request.total_len > request.told_len or request.finish_reason is not None:
                events.append(self._write(letter, now))
        return events

    def end(self, request: Request) -> Event:
        """The last piece of a request that was finished between two steps."""
        return self._write(self._letters[request.id], time.perf_counter())

    def _write(self, letter: Letter, now: float) -> Event:
        request = letter.request
        token_ids, logprobs = request.ids[request.told_len : request.total_len].tolist(), None
        try:
            text = _new_text(letter, token_ids)
        except BaseException as error:
            text = ""
            _fail(request, error)
        del token_ids[request.total_len - request.told_len :]  # behind a stop string
        if request.params.logprobs is not None:
            logprobs, request.logprobs = request.logprobs, []  # a long answer's take gigabytes
        of_prompt = None
        if token_ids:
            _count(request, now)
            if request.params.prompt_logprobs is not None and request.told_len <= request.given_len:
                of_prompt = [None, *request.prompt_logprobs]  # they leave with the first token
        request.told_len = request.total_len
        if request.finish_reason is None:
            piece = Piece(text, token_ids, logprobs, prompt_logprobs=of_prompt)
            return Event(request, piece, letter.on_piece)
        del self._letters[request.id]
        error = request.error
        refused = error if isinstance(error, Refused) else None
        ending = request.finish_reason, request.metrics, None if error is None else str(error)
        return Event(request, Piece(text, token_ids, logprobs, *ending, of_prompt, refused), letter.on_piece)


def _fail(request: Request, error: BaseException) -> None:
    """What a tokenizer raises may not take the other requests along."""
    request.fail(f"the tokenizer failed: {type(error).__name__}: {error}")


def _new_text(letter: Letter, token_ids: list[int]) -> str:
    request, growing = letter.request, letter.growing
    if growing is None:
        return ""
    text = ""
    for at, token_id in enumerate(token_ids):
        if token_id in request.stop_ids:  # it ends the text and is no part of it
            break
        num_before = request.told_len + at - request.prompt_len
        text += growing.push(token_id, may_stop=num_before >= request.params.min_tokens)
        if growing.stopped:
            request.stop_at(request.told_len + at + 1)
            break
    return text if request.finish_reason is None else text + growing.finish()


def _count(request: Request, now: float) -> None:
    metrics = request.metrics
    metrics.first_token = metrics.first_token or now
    metrics.last_token = now
    metrics.num_output_tokens = request.total_len - request.prompt_len
