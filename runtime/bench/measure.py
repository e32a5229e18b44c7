"""Sends sessions to an engine on their schedule and notes what comes back, and when."""

import heapq
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from hemiola.runtime.api import FinishReason, Metrics, OnPiece, Piece, SamplingParams
from hemiola.runtime.bench.workloads import Turns
from hemiola.runtime.errors import Failed, Refused

FAILED_BEFORE = "not sent: the turn before it failed"
LONGEST_WAIT = 0.2  # Ctrl-C may land in another thread, which does not wake this one


class Measurable(Protocol):
    """What is measured: an LLM."""

    def submit(self, prompt: Sequence[int], params: SamplingParams, on_piece: OnPiece) -> int: ...

    def abort(self, request_id: int) -> None: ...


@dataclass(slots=True)
class BenchResult:
    """One request. Latencies start when it was `due`: when its user wanted to send it."""

    session_id: int
    turn: int
    origin: str
    prompt_ids: list[int]
    params: SamplingParams
    due: float
    sent: float
    piece_times: list[float] = field(default_factory=list)  # of pieces that brought tokens
    piece_lens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    done: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: Metrics | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.session_id, self.turn

    @property
    def completed(self) -> bool:
        return self.finish_reason in ("stop", "length")


class Mailbox:
    """Where the engine's thread leaves requests that have ended; and the clock. Tests simulate it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[BenchResult | None] = SimpleQueue()

    def now(self) -> float:
        return time.perf_counter()

    def put(self, result: BenchResult | None) -> None:
        """None asks to stop."""
        self._queue.put(result)

    def get(self, timeout: float | None) -> BenchResult | None:
        """Raises queue.Empty when nothing came for a while, at the latest when the time is over."""
        return self._queue.get(timeout=LONGEST_WAIT if timeout is None else min(timeout, LONGEST_WAIT))


class Measured(NamedTuple):
    """A whole run. What was planned and is not in `results` was never finished."""

    results: list[BenchResult]  # ended, well or not, by session and turn
    num_planned: int
    start: float
    end: float
    interrupted: bool


class _Due(NamedTuple):
    time: float
    session_id: int
    turn: int
    history: list[int]


class Run:
    """One measurement.

    Open loop (`arrivals`): a session's first turn is due at its time, whatever the engine does. Closed loop
    (None): it is due when a place is free. Later turns are due a think time after the answer before them.
    `concurrency` is the number of places: sessions that may have begun and not ended.
    """

    def __init__(
        self,
        engine: Measurable,
        sessions: Sequence[Turns],
        arrivals: Sequence[float] | None,
        concurrency: int | None,
        ignore_eos: bool,
        mailbox: Mailbox,
        on_result: Callable[[BenchResult], None] = lambda result: None,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._ignore_eos = ignore_eos
        self._mailbox = mailbox
        self._on_result = on_result
        self._start = mailbox.now()
        times = [None] * len(sessions) if arrivals is None else [self._start + at for at in arrivals]
        self._waiting = deque(enumerate(times))  # sessions that have not begun
        self._places = deque([self._start] * (concurrency or len(sessions)))  # since when they are free
        self._turns: list[_Due] = []  # a heap: sessions between two turns
        self._in_flight: dict[tuple[int, int], int] = {}  # key -> request id
        self._results: list[BenchResult] = []

    def __call__(self) -> Measured:
        interrupted = False
        with _stopped_by_ctrl_c(self._mailbox):
            while self._waiting or self._turns or self._in_flight:
                self._send_due()
                try:
                    ended = self._mailbox.get(self._wait_time())
                except Empty:
                    continue
                if ended is None:
                    interrupted = True
                    break
                self._end(ended)
        for request_id in self._in_flight.values():
            self._engine.abort(request_id)
        results = sorted(self._results, key=lambda result: result.key)
        num_planned = sum(len(session) for session in self._sessions)
        return Measured(results, num_planned, self._start, self._mailbox.now(), interrupted)

    def _send_due(self) -> None:
        now = self._mailbox.now()
        while self._turns and self._turns[0].time <= now:
            self._send(heapq.heappop(self._turns))
        while (due := self._next_arrival()) is not None and due <= now:
            session_id, _ = self._waiting.popleft()
            self._places.popleft()
            self._send(_Due(due, session_id, 0, []))

    def _next_arrival(self) -> float | None:
        """When the next session wants to begin, if there is a place for it."""
        if not (self._waiting and self._places):
            return None
        time_wanted = self._waiting[0][1]
        return self._places[0] if time_wanted is None else time_wanted

    def _wait_time(self) -> float | None:
        times = [
            time
            for time in (self._next_arrival(), *(due.time for due in self._turns[:1]))
            if time is not None
        ]
        return max(0.0, min(times) - self._mailbox.now()) if times else None

    def _send(self, due: _Due) -> None:
        turn = self._sessions[due.session_id][due.turn]
        prompt_ids = due.history + turn.ids
        params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=self._ignore_eos)
        result = BenchResult(
            due.session_id, due.turn, turn.origin, prompt_ids, params, due.time, sent=self._mailbox.now()
        )
        self._in_flight[result.key] = 0
        try:
            self._in_flight[result.key] = self._engine.submit(prompt_ids, params, self._receiver(result))
        except (Refused, Failed) as error:
            result.finish_reason, result.error, result.done = "error", str(error), self._mailbox.now()
            self._mailbox.put(result)

    def _receiver(self, result: BenchResult) -> OnPiece:
        """Runs in the engine's thread, so it only takes notes."""

        def receive(piece: Piece) -> None:
            now = self._mailbox.now()
            if piece.token_ids:
                result.piece_times.append(now)
                result.piece_lens.append(len(piece.token_ids))
                result.token_ids += piece.token_ids
            if piece.finish_reason is not None:
                result.done, result.metrics, result.error = now, piece.metrics, piece.error
                result.finish_reason = piece.finish_reason
                self._mailbox.put(result)

        return receive

    def _end(self, result: BenchResult) -> None:
        del self._in_flight[result.key]
        self._results.append(result)
        self._on_result(result)
        session, later = self._sessions[result.session_id], result.turn + 1
        if later == len(session):
            self._places.append(result.done)
        elif result.completed:
            time_due = result.done + session[later].think_time
            history = result.prompt_ids + result.token_ids
            heapq.heappush(self._turns, _Due(time_due, result.session_id, later, history))
        else:
            self._give_up(result, session)

    def _give_up(self, failed: BenchResult, session: Turns) -> None:
        """Turns that need an answer that never came have failed, too."""
        for index in range(failed.turn + 1, len(session)):
            turn = session[index]
            params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=self._ignore_eos)
            never = BenchResult(failed.session_id, index, turn.origin, [], params, failed.done, failed.done)
            never.finish_reason, never.error, never.done = "error", FAILED_BEFORE, failed.done
            self._results.append(never)
            self._on_result(never)
        self._places.append(failed.done)


@contextmanager
def _stopped_by_ctrl_c(mailbox: Mailbox) -> Iterator[None]:
    """The first Ctrl-C ends the measurement, a second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        mailbox.put(None)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
