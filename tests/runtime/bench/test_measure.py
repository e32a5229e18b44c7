"""Schedules, against an engine and a clock without a clock: all times can be worked out by hand."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from typing import NamedTuple

import pytest

from hemiola.runtime.api import Metrics, OnPiece, Piece, SamplingParams
from hemiola.runtime.bench.measure import FAILED_BEFORE, BenchResult, Mailbox, Measured, Run
from hemiola.runtime.bench.statistics import peak
from hemiola.runtime.bench.workloads import Turn, Turns
from hemiola.runtime.errors import Refused


class Clock(Mailbox):
    """Time passes only while somebody waits."""

    def __init__(self) -> None:
        self.time = 100.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.results: deque[BenchResult | None] = deque()

    def now(self) -> float:
        return self.time

    def put(self, result: BenchResult | None) -> None:
        self.results.append(result)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), action))

    def get(self, timeout: float | None) -> BenchResult | None:
        deadline = math.inf if timeout is None else self.time + timeout
        while not self.results:
            if not self.events or self.events[0][0] > deadline:
                assert deadline < math.inf, "waits for ever"
                self.time = deadline
                raise Empty
            self.time, _, action = heapq.heappop(self.events)
            action()
        return self.results.popleft()


class Sent(NamedTuple):
    time: float
    prompt: list[int]
    params: SamplingParams


class SlowEngine:
    """Serves one request after another: `first` seconds to the first token, then `gap` to each piece.

    Token i of an answer is the prompt's length + i. `piece_lens` tokens come together, again and again.
    """

    def __init__(
        self, clock: Clock, first: float = 1.0, gap: float = 0.5, piece_lens: Sequence[int] = (1,)
    ) -> None:
        self.clock = clock
        self.first, self.gap, self.piece_lens = first, gap, piece_lens
        self.free = 0.0
        self.sent: list[Sent] = []
        self.aborted: list[int] = []
        self.refuse: Callable[[list[int]], bool] = lambda prompt: False
        self.fail: Callable[[list[int]], bool] = lambda prompt: False

    def submit(self, prompt: Sequence[int], params: SamplingParams, on_piece: OnPiece) -> int:
        if self.refuse(list(prompt)):
            raise Refused("other", message="prompt is refused; change it")
        self.sent.append(Sent(self.clock.time, list(prompt), params))
        time = max(self.free, self.clock.time) + self.first
        left = list(range(len(prompt), len(prompt) + params.max_tokens))
        lens = itertools.cycle(self.piece_lens)
        if self.fail(list(prompt)):
            self.free = time
            piece = Piece("", [], None, "error", metrics(prompt), "it broke")
            self.clock.at(time, partial(on_piece, piece))
            return len(self.sent)
        while left:
            length = next(lens)
            now, left = left[:length], left[length:]
            end = {} if left else {"finish_reason": "length", "metrics": metrics(prompt)}
            self.clock.at(time, partial(on_piece, Piece("", now, **end)))
            self.free, time = time, time + self.gap
        return len(self.sent)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


def metrics(prompt: Sequence[int]) -> Metrics:
    return Metrics(num_prompt_tokens=len(prompt), arrival=0.0)


def single(*prompt_lens: int, max_tokens: int = 3) -> list[Turns]:
    return [[Turn([9] * length, max_tokens, 0.0, f"request {i}")] for i, length in enumerate(prompt_lens)]


def measure(
    engine: SlowEngine,
    sessions: list[Turns],
    arrivals: list[float] | None = None,
    concurrency: int | None = None,
) -> Measured:
    return Run(engine, sessions, arrivals, concurrency, True, engine.clock)()


def times(measured: Measured, name: str) -> list[float]:
    return [getattr(result, name) - measured.start for result in measured.results]


def thinker(seconds: float) -> Turns:
    return [Turn([1], 1, 0.0, "a"), Turn([1], 1, seconds, "b")]


# 2 s a request of three tokens and 1 s one of one token, one at a time: arrivals, places; due, sent, done.
SCHEDULES = {
    "sent on time and counted from there, however far the engine lags": (
        single(1, 1, 1, 1), [0.25, 0.5, 0.75, 1.0], None,
        [0.25, 0.5, 0.75, 1.0], [0.25, 0.5, 0.75, 1.0], [2.25, 4.25, 6.25, 8.25],
    ),
    "a client that waits for a place does not hide the wait": (
        single(1, 1, 1), [0.5, 0.5, 0.5], 1, [0.5, 0.5, 0.5], [0.5, 2.5, 4.5], [2.5, 4.5, 6.5],
    ),
    "without arrivals due when a place is free": (
        single(1, 1, 1, 1), None, 2, [0.0, 0.0, 2.0, 4.0], [0.0, 0.0, 2.0, 4.0], [2.0, 4.0, 6.0, 8.0],
    ),
    "without limits due at the start": (
        single(1, 1, 1), None, None, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 4.0, 6.0],
    ),
    "a place belongs to a session until its last turn": (
        [thinker(10.0), *single(1, max_tokens=1)], None, 1,
        [0.0, 11.0, 12.0], [0.0, 11.0, 12.0], [1.0, 12.0, 13.0],
    ),
    "sessions that think do not hold up arrivals": (
        [thinker(10.0), *single(1, max_tokens=1)], [0.0, 5.0], None,
        [0.0, 11.0, 5.0], [0.0, 11.0, 5.0], [1.0, 12.0, 6.0],
    ),
    "a later turn that is late counts from when it was due": (
        [thinker(0.5), *single(1, 1)], [0.0, 0.0, 0.0], None,
        [0.0, 1.5, 0.0, 0.0], [0.0, 1.5, 0.0, 0.0], [1.0, 6.0, 3.0, 5.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_by_hand(case: str) -> None:
    sessions, arrivals, concurrency, *expected = SCHEDULES[case]
    measured = measure(SlowEngine(Clock()), sessions, arrivals, concurrency)
    assert [times(measured, name) for name in ("due", "sent", "done")] == expected
    assert measured.end - measured.start == max(expected[2])


def test_pieces_are_noted_with_their_time_and_size() -> None:
    engine = SlowEngine(Clock(), piece_lens=(1, 3))
    [result] = measure(engine, single(2, max_tokens=6)).results
    assert [time - result.due for time in result.piece_times] == [1.0, 1.5, 2.0, 2.5]
    assert result.piece_lens == [1, 3, 1, 1] and result.token_ids == [2, 3, 4, 5, 6, 7]
    assert result.completed and result.metrics is not None


def test_a_turn_asks_with_the_whole_history_and_after_the_think_time() -> None:
    session = [Turn([1, 2], 2, 0.0, "a"), Turn([3], 3, 4.0, "b"), Turn([5], 1, 0.0, "c")]
    engine = SlowEngine(Clock())
    measured = measure(engine, [session])
    first, second = [1, 2, 2, 3], [1, 2, 2, 3, 3, 5, 6, 7]
    assert [sent.prompt for sent in engine.sent] == [[1, 2], [*first, 3], [*second, 5]]
    assert [sent.params.max_tokens for sent in engine.sent] == [2, 3, 1]
    assert all(sent.params.ignore_eos for sent in engine.sent)
    assert times(measured, "done") == [1.5, 7.5, 8.5] and times(measured, "due") == [0.0, 5.5, 7.5]
    assert [result.key for result in measured.results] == [(0, 0), (0, 1), (0, 2)]


def test_failed_requests_are_kept_and_the_rest_runs_on() -> None:
    engine = SlowEngine(Clock())
    engine.refuse = lambda prompt: len(prompt) == 2
    engine.fail = lambda prompt: len(prompt) == 3
    measured = measure(engine, single(1, 2, 3, 4), concurrency=1)
    assert [result.completed for result in measured.results] == [True, False, False, True]
    assert (
        measured.results[1].error == "prompt is refused; change it"
        and measured.results[2].error == "it broke"
    )
    assert measured.results[2].piece_times == [], "an error is no token"
    assert measured.num_planned == 4 and not measured.interrupted


def test_turns_after_a_failed_one_have_failed_and_free_their_place() -> None:
    engine = SlowEngine(Clock())
    engine.fail = lambda prompt: prompt == [7]
    sessions = [
        [Turn([7], 1, 0.0, "a"), Turn([1], 1, 0.0, "b"), Turn([1], 1, 0.0, "c")],
        *single(1, max_tokens=1),
    ]
    measured = measure(engine, sessions, concurrency=1)
    assert [result.error for result in measured.results] == ["it broke", FAILED_BEFORE, FAILED_BEFORE, None]
    assert measured.results[3].completed and len(measured.results) == measured.num_planned


def test_a_stop_keeps_what_has_ended_and_aborts_the_rest() -> None:
    engine = SlowEngine(Clock())
    engine.clock.at(102.5, lambda: engine.clock.put(None))
    measured = measure(engine, single(1, 1, 1), [0.0, 0.0, 50.0])
    assert measured.interrupted and [result.key for result in measured.results] == [(0, 0)]
    assert measured.num_planned == 3 and engine.aborted == [2]
    assert measured.end - measured.start == 2.5


def test_every_ended_request_is_reported_once() -> None:
    engine = SlowEngine(Clock())
    engine.fail = lambda prompt: prompt == [7]
    sessions = [[Turn([7], 1, 0.0, "a"), Turn([1], 1, 0.0, "b")], *single(1, 1)]
    seen: list[BenchResult] = []
    Run(engine, sessions, None, None, False, engine.clock, seen.append)()
    assert sorted(result.key for result in seen) == [(0, 0), (0, 1), (1, 0), (2, 0)]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_no_more_sessions_than_places(concurrency: int) -> None:
    engine = SlowEngine(Clock(), first=0.3)
    sessions = [[Turn([1], 2, 0.0, "a"), Turn([1], 2, 0.7, "b")] for _ in range(7)]
    measured = measure(engine, sessions, [0.1 * i for i in range(7)], concurrency)
    first, second = measured.results[::2], measured.results[1::2]
    spans = [(one.sent, two.done) for one, two in zip(first, second, strict=True)]
    assert peak(spans) == concurrency
