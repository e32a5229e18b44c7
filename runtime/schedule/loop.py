"""The loop: the only place that knows the order of a step, and the thread that repeats it."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeVar

import torch

from hemiola.runtime.api import Counters, Load, OnPiece
from hemiola.runtime.cache.depth import Depth, Observer, SafeObserver
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.choose.grammar import Stuck
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.memory import close_all
from hemiola.runtime.device.transfer import fence
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.running_time import RunningTime
from hemiola.runtime.schedule.inbox import (
    Abort,
    Close,
    Fetched,
    Flush,
    Inbox,
    Look,
    Lose,
    Message,
    Submit,
)
from hemiola.runtime.schedule.outbox import Event, Outbox
from hemiola.runtime.schedule.plan import Launched, Outcome, Plan, Steps
from hemiola.runtime.schedule.request import Request, refused_by_grammar
from hemiola.runtime.schedule.scheduler import Scheduler

T = TypeVar("T")
IDLE_SECONDS = 1.0  # without work before the caches are audited
MOST_AUDITED = 10_000  # pages in all tiers: more would let the next request wait longer than 0.1 s
log = logging.getLogger("hemiola")


class Store(Protocol):
    """A Storage, or in tests something that keeps other things in slots."""

    def copy_slot(self, source: int, target: int) -> None: ...


class _Flight(NamedTuple):
    """A step under way: what the host needs to end it."""

    plan: Plan
    output: Launched
    wait: Callable[[], None]  # until the rest can be read
    launch_seconds: float  # of the host, if they are measured
    busy: float  # share of them in which it had a core


class _Stopwatch:
    """Seconds since it was made, and in which share of them this thread had a core."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def seconds(self) -> tuple[float, float]:
        wall, busy = time.perf_counter() - self._start[0], time.thread_time() - self._start[1]
        return wall, min(busy / max(wall, 1e-9), 1.0)


class Loop:
    """`step` is the engine's heartbeat; `start` lets a thread of its own call it while there is work."""

    def __init__(
        self,
        config: Resolved,
        scheduler: Scheduler,
        storage: Store,
        steps: Steps,
        outbox: Outbox,
        device: torch.device,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.storage = storage
        self.steps = steps
        self.outbox = outbox
        self.device = device
        self._num_calls: Callable[[], int] = lambda: 0  # of kernels, also within a step
        if device.type == "cpu":
            from hemiola.plugins.cpu.steps import num_calls  # numba is not needed elsewhere

            self._num_calls = num_calls
        self.counters = Counters()
        self._flights: deque[_Flight] = deque()
        self._inbox = inbox = Inbox()
        if (disk := scheduler.prefix.disk) is not None:
            disk.wake = lambda: inbox.put(Fetched())  # it does not refer to this loop
        self._closing = False
        self._now: Callable[[], float] = time.monotonic
        # when the thread last began a turn, by the clock; inf: it waits for work
        self._turned = math.inf
        self._moved = (0, -math.inf)  # the last number of calls that was seen, and when it was new
        self._held = ExitStack()
        self._thread: threading.Thread | None = None

    def step(self) -> list[Event]:
        """Launch a step if one can be planned; end the oldest, if more than pipeline_depth are under way."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan.rows:
            self._flights.append(self._launch(plan))
        assert self._flights, "nothing can run"
        events = []
        if len(self._flights) > self.config.pipeline_depth or not plan.rows:
            events = self._land(self._flights.popleft())
        self.counters.step_seconds += time.perf_counter() - start
        return events

    def _launch(self, plan: Plan) -> _Flight:
        """What the device does, in order; nothing here waits for it."""
        took = _Stopwatch() if self.scheduler.pace.adaptive else None
        for opening in plan.openings:
            if opening.restore_from:
                self.storage.copy_slot(opening.restore_from, opening.slot_id)
            self.steps.open(opening.slot_id, opening.ids, opening.start, opening.rule)
        output = self.steps.launch(plan)
        seconds, busy = took.seconds() if took is not None else (0.0, 0.0)
        return _Flight(plan, output, fence(self.device), seconds, busy)

    def _clock(self, flight: _Flight, num_decodes: int) -> None:
        plan = flight.plan
        running, judging, drafting = flight.output.seconds()
        self.counters.engine_seconds += running
        self.counters.device_seconds += running + judging + drafting
        if num_decodes == 0:
            self.scheduler.prefix.computed(plan.num_tokens, running)
        if self.scheduler.pace.adaptive and num_decodes == len(plan.rows):
            num_drafts = sum(row.num_drafts for row in plan.rows)
            num_passes = max(row.room for row in plan.rows)
            step = running + judging
            if self.device.type == "cpu":  # which is busy with all of a step, or with other processes
                step, drafting = (flight.launch_seconds - drafting) * flight.busy, drafting * flight.busy
            self.scheduler.pace.timed(len(plan.rows), num_drafts, num_passes, step, drafting)

    def _land(self, flight: _Flight) -> list[Event]:
        """What the host learns from a step, and does about it."""
        plan = flight.plan
        flight.wait()
        num_decodes = sum(row.num_tokens == 1 + row.num_drafts for row in plan.rows)
        self._clock(flight, num_decodes)
        outcome = flight.output.read()
        for n, fault in outcome.faults.items():
            plan.rows[n].request.fail(fault)
        self.scheduler.commit(plan, outcome)
        self._follow(plan, outcome)
        events = self.outbox.drain(plan)
        try:
            self.scheduler.reap(plan)
        except BaseException:
            self._deliver(events)  # of those that ended the outbox knows nothing any more
            raise
        self._count(plan, num_decodes, events)
        return events

    def _follow(self, plan: Plan, outcome: Outcome) -> None:
        """Let grammars read what their texts have become; a request that cannot go on ends here, alone."""
        for n, drafts in outcome.drafts.items():
            request = plan.rows[n].request
            if request.guide is None or request.finish_reason is not None:
                continue
            try:
                text = request.ids[: request.total_len]
                request.num_drafts = request.guide.follow(text, drafts[: request.num_drafts])
            except Stuck as stuck:
                request.fail(refused_by_grammar(stuck))
            except BaseException as error:  # the grammar library's, panics, too: it costs no other request
                request.fail(f"structured_outputs: {type(error).__name__}: {error}")

    def _count(self, plan: Plan, num_decodes: int, events: list[Event]) -> None:
        counters = self.counters
        counters.num_steps += 1
        if num_decodes < len(plan.rows):
            counters.num_mixed_steps += num_decodes > 0
            counters.num_prompt_steps += num_decodes == 0
        counters.num_computed_tokens += plan.num_tokens
        counters.num_preemptions = self.scheduler.num_preemptions
        for event in events:
            counters.num_output_tokens += len(event.piece.token_ids)
            counters.num_finished += event.piece.finish_reason is not None

    # What other threads call.

    def start(self, held: ExitStack | None = None) -> None:
        """held: is closed by the thread when it ends, however it does."""
        self._held = held or self._held
        self._now = clock = RunningTime()
        self._held.callback(clock.end)
        thread = threading.Thread(target=self._run, name="hemiola-loop", daemon=True)
        thread.start()  # or it names this loop as long as the loop names it
        self._thread = thread

    def submit(self, request: Request, on_piece: OnPiece) -> None:
        """Queue a request; on_piece is called in the loop's thread. Raises Failed when the engine is lost."""
        self._inbox.submit(self.outbox.letter(request, on_piece))

    def check_open(self) -> None:
        """Raises Refused when the engine is closed or another process's, Failed when it is lost."""
        self._inbox.check()

    def abort(self, request_id: int) -> None:
        """End a request soon, with finish_reason "cancelled"; one that has ended already is left alone."""
        self._inbox.put(Abort(request_id))

    def flush(self) -> None:
        """Forget what the prefix cache has, before the next step; what runs goes on."""
        self._inbox.put(Flush())

    def watch(self, observer: Observer) -> None:
        """Before the next step it is told where requests can start; then, each time when that changes."""
        depth = Depth(SafeObserver(observer))
        self._inbox.put(Look(lambda prefix: prefix.watch(depth), Future()))

    def visit(self, act: Callable[[PrefixCache], T]) -> T:
        """Let act run in the loop's thread between two steps; returns or raises what it does. Raises Refused
        when the engine is closed, or when that thread itself asks."""
        self.check_may_wait()
        future = self._inbox.look(act)
        try:
            return future.result()
        except BaseException:  # also Ctrl-C: who called knows that it is done, and what must be given back
            wait([future])
            raise

    def check_may_wait(self) -> None:
        """Raises Refused in the loop's own thread and in a fork: what is waited for would never come."""
        self._inbox.check_owner()
        if threading.current_thread() is self._thread:
            message = "on_piece may not wait for the thread that calls it"
            raise Refused("conflict", message=message, way_out="call this from another thread")

    def lose(self, error: Failed) -> None:
        """End all requests with this error; by who sees what the loop does not, also while it waits."""
        self._inbox.put(Lose(error))

    def load(self) -> Load:
        """What the engine holds, and whether it moves. Never waits for it."""
        pages, slots = self.scheduler.prefix.pages, self.scheduler.slots
        return Load(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.scheduler.fetching) + len(self._inbox),
            num_pages=pages.num_pages - 1,
            num_free_pages=pages.num_free,
            num_idle_pages=pages.num_idle,
            num_slots=self.config.num_slots - 1,
            num_free_slots=slots.num_free,
            stalled_s=self._stalled_s(),
            failure=self._inbox.failure,
        )

    def _stalled_s(self) -> float:
        """A long step is no stall while its kernels are called, as far as a device lets us see them."""
        now, num_calls = self._now(), self._num_calls()
        if num_calls != self._moved[0]:
            self._moved = (num_calls, now)
        return max(0.0, now - max(self._turned, self._moved[1]))

    def close(self, drain: bool = False) -> None:
        """Take no more requests, finish (drain) or cancel those there are, and end the thread; with it goes
        all that lies on the device."""
        self._inbox.refuse(Refused("closed", message="the engine is closed", way_out="open it again"))
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(Close(drain))
            if self._thread is not threading.current_thread():  # it may be an on_piece that closes
                self._thread.join()

    # What the loop's thread does.

    def audit(self) -> None:
        """Every request whose user waits for an end runs or waits, once; and all that the scheduler owns."""
        self.scheduler.audit()
        scheduler = self.scheduler
        held = {*scheduler.running, *scheduler.waiting, *scheduler.fetching}
        for request in self.outbox.all():
            assert request in held, f"request {request.id} is lost: it neither runs nor waits"

    def _run(self) -> None:
        try:
            while not self._closing or self._busy or self.scheduler.fetching:
                self._turned = self._now()
                self.turn()
            self.scheduler.prefix.save()
        except BaseException as error:  # sys.exit() ends this thread and not the process
            log.exception("the engine failed")
            said = str(error).partition("\n")[0]  # CUDA's have advice behind it
            kind = type(error) if isinstance(error, Failed) else Failed
            self._fail(f"{type(error).__name__}: {said}", kind)
        finally:
            self._turned = math.inf
            self._let_go()

    def _let_go(self) -> None:
        """The next engine finds free what this one had on the device, whoever still holds this loop."""
        self._flights.clear()
        del self.storage, self.steps
        close_all(self._held)

    @property
    def _busy(self) -> bool:
        return self.scheduler.busy or bool(self._flights)

    def turn(self) -> None:
        """Read the inbox; if anything runs, do one step and deliver. If nothing does, wait for a message."""
        self._read_inbox()
        if self._busy:
            self._deliver(self.step())

    def _read_inbox(self) -> None:
        """All messages there are; waits for one if nothing can run."""
        if not self._busy:
            self._turned = math.inf
            message = self._inbox.wait(IDLE_SECONDS, self._idle)
            self._turned = self._now()
            self._read(message)
        for message in self._inbox.take():
            self._read(message)

    def _idle(self) -> bool:
        """Whether to look again soon: from a disk that hangs no message comes."""
        if self.scheduler.prefix.num_entries <= MOST_AUDITED:
            self.audit()
        if self.scheduler.prefix.is_overdue:
            self._inbox.put(Fetched())
        return self.scheduler.prefix.is_awaited

    def _read(self, message: Message) -> None:
        match message:
            case Submit(letter):
                self.outbox.open(letter)
                if (request := letter.request).finish_reason is None:
                    self.scheduler.add(request)
                else:
                    self._deliver([self.outbox.end(request)])
            case Abort(request_id):
                request = self.outbox.get(request_id)
                if request is not None:
                    self._cancel(request)
            case Fetched():
                self.scheduler.prefix.collect()
            case Flush():
                self.scheduler.prefix.flush()
            case Look(act, done):
                self._look(act, done)
            case Lose(error):
                raise error
            case Close(drain):
                self._closing = True
                for request in [] if drain else self.outbox.all():
                    self._cancel(request)

    def _look(self, act: Callable[[PrefixCache], T], done: "Future[T]") -> None:
        """What is refused is the caller's; any other error leaves the cache in doubt, and ends the engine."""
        try:
            done.set_result(act(self.scheduler.prefix))
        except Refused as refused:
            done.set_exception(refused)
        except BaseException as error:
            done.set_exception(error)
            raise

    def _cancel(self, request: Request) -> None:
        self.scheduler.abort(request)
        self._deliver([self.outbox.end(request)])

    def _deliver(self, events: list[Event]) -> None:
        """A callback that raises costs its own request, and no other."""
        for event in events:
            try:
                event.on_piece(event.piece)
            except BaseException:  # sys.exit(), too
                log.exception("request %d: on_piece raised; the request ends", event.request.id)
                if event.piece.finish_reason is None:
                    self.scheduler.abort(event.request)
                    self.outbox.end(event.request)

    def _fail(self, reason: str, kind: type[Failed]) -> None:
        """The engine is lost: end every request, those still in the inbox included."""
        self._inbox.refuse(kind(f"the engine failed ({reason}) and takes no more requests; open it again"))
        for message in self._inbox.take():
            if isinstance(message, Submit):
                self.outbox.open(message.letter)
            elif isinstance(message, Look):
                message.done.set_exception(kind(f"the engine failed: {reason}"))
        for request in self.outbox.all():
            request.fail(f"the engine failed: {reason}")
            self._deliver([self.outbox.end(request)])
