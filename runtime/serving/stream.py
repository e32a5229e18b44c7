"""One request to the Triton model on its way out: its answers, how it ended, what operators read of that."""

import math
import threading
import time
from collections import deque
from typing import Any, Literal

from hemiola.runtime.api import Piece
from hemiola.runtime.errors import shown
from hemiola.runtime.serving.ask import Ask
from hemiola.runtime.serving.error_text import INTERNAL, kind_and_text
from hemiola.runtime.serving.metrics import Outcome

Failure = tuple[str, str]  # code and message
Reason = Literal["", "cancelled", "timeout"]  # why a request is ended early
# By code.
OUTCOMES: dict[str, Outcome] = {"INVALID_ARG": "invalid", "OVERLOADED": "rejected", "CANCELLED": "cancelled"}


class Branch:
    """One of the n answers of a request: what the engine has said and nobody has sent yet."""

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self.request_id: int | None = None  # known once submit has returned
        self.said: deque[Piece] = deque()
        self.last_said = 0.0
        self.num_tokens = 0
        self.cum_logprob = 0.0


class Stream:
    """One request on its way out. Several threads may end it early: the first reason stays."""

    def __init__(self, name: str, sender: Any, ask: Ask, arrival: float) -> None:
        self.name = name  # the caller's id, "" if none
        self.sender = sender
        self.flags = ask.flags
        self.input_ids: list[int] = []  # known once the prompt is tokenized
        self.echo = "" if ask.flags["exclude_input_in_output"] else str(ask.prompt)
        self.branches = [Branch(self) for _ in range(ask.n)]
        self.num_running = ask.n
        self.arrival = arrival  # at the door
        self.deadline = self.arrival + ask.timeout_s if ask.timeout_s else math.inf
        self.reason: Reason = ""
        self._lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return bool(self.reason)

    def end(self, reason: Reason) -> None:
        with self._lock:
            self.reason = self.reason or reason


def error_of(stream: Stream, lasts: list[Piece]) -> Failure | None:
    """Code and message, if a request ends as an error."""
    reasons = [last.finish_reason for last in lasts]
    if "error" in reasons:
        last = lasts[reasons.index("error")]
        if last.refused is not None:
            return kind_and_text(last.refused, stream.flags["error_data"])
        return INTERNAL, last.error or "the engine failed"
    if "cancelled" in reasons and stream.reason != "timeout":
        return "CANCELLED", "the request was cancelled"
    return None


def outcome_of(stream: Stream, failure: Failure | None) -> Outcome:
    if failure is not None:
        return OUTCOMES.get(failure[0], "error")
    return "timeout" if stream.reason == "timeout" else "success"


def line_of(stream: Stream, lasts: list[Piece], outcome: str) -> str:
    """For operators; nothing of what was said."""
    said = f"request {shown(stream.name)}: {outcome}, {len(stream.input_ids)} tokens in"
    for last in lasts:
        metrics = last.metrics
        if metrics is not None:
            queued = max(0.0, metrics.first_scheduled - metrics.arrival)
            said += (
                f"; {metrics.num_output_tokens} out ({last.finish_reason}), {metrics.cached_tokens} cached,"
                f" queued {queued:.3f} s, first {max(0.0, metrics.time_to_first_token):.3f} s"
            )
    return f"{said}; total {time.perf_counter() - stream.arrival:.3f} s"
