"""An LLM as the engine that Dynamo's worker drives. The methods' names and arguments are Dynamo's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hemiola.runtime.api import FinishReason, Load, OnPiece, Piece
from hemiola.runtime.dynamo.binding import Errors
from hemiola.runtime.dynamo.events import CacheEvents, Publisher, PushSource
from hemiola.runtime.dynamo.handover import Handover
from hemiola.runtime.dynamo.load import Snapshot
from hemiola.runtime.dynamo.metrics import EngineMetrics, add_page, measure
from hemiola.runtime.dynamo.pieces import Doorbell, PieceStream
from hemiola.runtime.dynamo.reply import PROBED, Chunk, chunk_of, ended_chunk, last_chunk
from hemiola.runtime.dynamo.request import Submission, link_of, read_request
from hemiola.runtime.errors import Busy, Failed, Refused, counted
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.heartbeat import Awake
from hemiola.runtime.serving.metrics import Meter, Outcome

WATCH_S = 0.25  # between two looks at the engine's load
PROBE = "_HEALTH_CHECK"  # names a request by which Dynamo learns whether the worker is well
STILL_S = 1.0  # without a step, after which a busy engine answers no probe
OUTCOMES: dict[FinishReason, Outcome] = {
    "stop": "success",
    "length": "success",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "error": "error",
}


class WorkerBounds(NamedTuple):
    """What a worker takes; see WorkerOptions."""

    min_priority: int = 0
    hang_timeout_s: float = 60
    max_queue: int = 256


class Context(Protocol):
    """One request of Dynamo's."""

    def id(self) -> str: ...


class _Running:
    """A request of Dynamo's. Its caller may leave while its grammar is compiled: then it has no id yet."""

    def __init__(self, name: str, abort: Callable[[int], None], put: OnPiece) -> None:
        self.name = name  # Dynamo's id, which callers may choose: several may have the same
        self.put = put
        self._abort = abort
        self._request_id: int | None = None
        self._left = False
        self.outcome: Outcome = "cancelled"  # of one whose caller just leaves

    def submitted(self, request_id: int) -> None:
        """By the thread that submits; whichever of this and `leave` comes last aborts."""
        self._request_id = request_id
        if self._left:
            self._abort(request_id)

    def leave(self) -> None:
        self._left = True
        if self._request_id is not None:
            self._abort(self._request_id)


class DynamoEngine:
    """Opens the LLM when it starts. on_lost: is called once, with the reason, when the engine is lost."""

    def __init__(
        self,
        open_llm: Callable[[], LLM],
        register: Callable[[LLM], object],
        errors: Errors,
        bounds: WorkerBounds,
        on_lost: Callable[[str], None],
        hand_over: Callable[[LLM], Handover] | None = None,
        store: Path | None = None,
    ) -> None:
        """hand_over: makes its part, of a prefill or a decode worker. store: the folder in which frontends
        find it, where it is one: once that has gone, nobody does."""
        self._store, self._has_store = store, False
        self._hand_over = hand_over
        self._handover: Handover | None = None
        self._open_llm, self._register, self._errors = open_llm, register, errors
        self._bounds, self._on_lost = bounds, on_lost
        self._llm: LLM | None = None
        self.error: Exception | None = None  # why it did not open
        self._meter: Meter | None = None
        self._running: set[_Running] = set()
        self._events: CacheEvents | None = None
        self._load_publisher: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._hangs = ""  # how, once it does

    # Its life.

    async def start(self, worker_id: int) -> object:
        """Nobody finds the worker before this returns."""
        self._doorbell = Doorbell(asyncio.get_running_loop())
        try:
            self._llm = await asyncio.to_thread(self._open_llm)
            self._meter = Meter(self._llm.config.num_drafts)
            if self._hand_over is not None:
                self._handover = self._hand_over(self._llm)
        except Exception as error:
            self.error = error
            raise
        self._watch = asyncio.create_task(self._watch_load(self._llm))
        return self._register(self._llm)

    async def is_quiescent(self) -> bool:
        return not self._running

    async def cleanup(self) -> None:
        """Finish what runs: Dynamo sends nothing more. Safe to call twice, and when `start` failed. Nobody
        waits for an engine that hangs: it ends with its process."""
        if self._watch is not None:
            self._watch.cancel()
        if self._llm is not None and not self._hangs:
            lost = bool(self._llm.load().failure)
            await asyncio.to_thread(self._llm.close, not lost)
        if self._handover is not None and not self._hangs:
            await asyncio.to_thread(self._handover.close)
        if self._events is not None:
            self._events.close()

    # Requests.

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncIterator[Chunk]:
        """The chunks of one request."""
        llm, meter, pieces = self._opened(), self._meter, PieceStream(self._doorbell)
        assert meter is not None, "there is one since the engine was opened"
        if request.get(PROBE) is True and await self._is_at_work(llm):
            yield PROBED
            return
        self._check_room(llm, meter)
        if self._hangs:
            raise self._errors.lost(self._hangs)
        running = _Running(context.id(), llm.abort, pieces.put)
        self._running.add(running)
        try:
            asked = await self._submit(llm, request, pieces.put, running)
            meter.taken(len(asked.prompt))
            if asked.ended is not None:
                running.outcome = OUTCOMES[asked.ended]
                yield ended_chunk(asked.ended, len(asked.prompt), len(asked.output_ids)) | self._handed_over
                return
            link, scores = link_of(len(asked.prompt)), None
            while True:
                piece = await pieces
                scores = scores or piece.prompt_logprobs
                if piece.finish_reason is None:
                    yield chunk_of(piece, link)
                    continue
                running.outcome = OUTCOMES[piece.finish_reason]
                if piece.metrics is not None:
                    measure(meter, piece.metrics, len(asked.output_ids), running.outcome == "success")
                self._check(llm, piece)
                is_long = scores is not None  # tens of thousands of them: other streams do not wait
                make = partial(last_chunk, piece, scores, link)
                chunk = await asyncio.to_thread(make) if is_long else make()
                yield chunk | self._handed_over
                return
        finally:
            self._running.discard(running)
            running.leave()
            meter.ended(running.outcome)

    async def abort(self, context: Context) -> None:
        """The caller has left."""
        for running in self._running:
            if running.name == context.id():
                running.leave()

    @property
    def _handed_over(self) -> Chunk:
        """What a last chunk has for the worker that answers."""
        return self._handover.result if self._handover is not None else {}

    def _opened(self) -> LLM:
        if self._llm is None:
            raise self._errors.lost("the engine is not open")
        return self._llm

    async def _submit(
        self, llm: LLM, request: Mapping[str, Any], put: OnPiece, running: _Running
    ) -> Submission:
        handover = self._handover
        try:
            given = handover.asked(request) if handover else request
            asked = read_request(given, llm.config.max_len, self._bounds.min_priority)
            if asked.ended is not None:
                return asked
            if handover is not None:
                await handover.receive(request, asked)
            prompt, output_ids, params, _ = asked

            def submit() -> None:
                running.submitted(llm.submit(prompt, params, put, output_ids=output_ids, wants_text=False))

            if params.structured_outputs is None and not (output_ids and params.stop):
                submit()
            else:  # it waits for the grammar; or stop strings are looked for in all that was said
                await asyncio.to_thread(submit)
            return asked
        except Refused as error:
            running.outcome = "error" if error.code == "closed" else "invalid"
            kind = self._errors.lost if error.code == "closed" else self._errors.invalid
            raise kind(str(error)) from None
        except Failed as error:
            running.outcome = "error"
            raise self._errors.lost(str(error)) from None
        except Busy as error:
            running.outcome = "rejected"
            raise self._errors.failed(str(error)) from None

    async def _is_at_work(self, llm: LLM) -> bool:
        """Then a probe need not wait behind its requests, for longer than Dynamo waits: busy workers were
        taken for lost. As long as a busy engine does not move, its probe waits."""
        while True:
            load = llm.load()
            if load.failure or not load.num_running:
                return False
            if load.stalled_s < STILL_S:
                return True
            await asyncio.sleep(WATCH_S)

    def _check_room(self, llm: LLM, meter: Meter) -> None:
        max_rows, max_queue = llm.config.max_rows, self._bounds.max_queue
        if len(self._running) >= max_rows + max_queue:
            meter.ended("rejected")
            raise self._errors.busy(
                f"{counted(len(self._running), 'request is', 'requests are')} under way in"
                f" {counted(max_rows, 'row', 'rows')}, and no more than max_queue={max_queue} may wait"
            )

    def _check(self, llm: LLM, piece: Piece) -> None:
        if piece.finish_reason == "error":
            kind = self._errors.lost if self._hangs or llm.load().failure else self._errors.failed
            raise kind(piece.error or "the request failed")

    # What Dynamo shows and routes by.

    async def health_check_payload(self) -> dict[str, Any]:
        """A request of one token, which Dynamo sends when no other one has ended for a while."""
        eos_ids = self._opened().manifest.eos_ids
        return {
            "token_ids": [eos_ids[0] if eos_ids else 0],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            PROBE: True,
        }

    async def kv_event_sources(self) -> list[PushSource]:
        llm = self._opened()
        return [PushSource(partial(self._publish, llm))] if llm.config.prefix_cache else []

    def _publish(self, llm: LLM, publisher: Publisher) -> None:
        self._events = CacheEvents(publisher, llm.config.page_len)
        llm.watch_cache(self._events)

    async def register_prometheus(self, metrics: EngineMetrics) -> None:
        assert self._meter is not None
        add_page(metrics, self._meter, self._opened())

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: object) -> None:
        self._load_publisher = publisher

    async def _watch_load(self, llm: LLM) -> None:
        """Publish the load when it changes, and see whether the engine still moves."""
        last: Snapshot | None = None
        awake = Awake()
        while True:
            load = llm.load()
            reason = self._why_lost(load, awake.look())
            if reason:
                for running in self._running if self._hangs else ():  # it says nothing any more
                    running.put(Piece("", [], finish_reason="error", error=reason))
                self._on_lost(reason)
                return
            snapshot = Snapshot.of(load, llm.reuse)
            if self._load_publisher is not None and snapshot != last:
                with suppress(Exception):  # it may be better next time
                    self._load_publisher.publish(0, snapshot)
                    last = snapshot
            await asyncio.sleep(WATCH_S)

    def _why_lost(self, load: Load, awake_s: float) -> str:
        if load.failure:
            return load.failure
        if min(load.stalled_s, awake_s) > self._bounds.hang_timeout_s:
            self._hangs = f"the engine has not moved for {load.stalled_s:.0f} s"
            return self._hangs
        if self._store is not None:
            had = self._has_store
            with suppress(OSError):  # no answer: a file system of the network
                self._has_store = self._store.is_dir()
            if had and not self._has_store:
                return f"{self._store}, in which frontends find this worker, was removed"
        return ""

    # What it does not offer.

    async def on_endpoint_ready(self, endpoint: object) -> None: ...

    async def logits_processor_spec(self) -> None: ...

    def supported_controls(self) -> set[str]:
        return set()

    def supported_updates(self) -> set[str]:
        return set()
