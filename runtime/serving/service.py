"""One engine behind Triton's Python backend: checks and queues requests, while the LLM's thread computes."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hemiola.runtime.errors import Busy, Lost, Refused, counted
from hemiola.runtime.progress import File
from hemiola.runtime.serving import ending, heartbeat, home, settings
from hemiola.runtime.serving.arrival import NAME as ARRIVAL
from hemiola.runtime.serving.arrival import read_mark
from hemiola.runtime.serving.ask import (
    Ask,
    check_id,
    check_priority,
    check_scores,
    check_total,
    read_ask,
    read_request,
    wants_data,
)
from hemiola.runtime.serving.error_text import kind_and_text
from hemiola.runtime.serving.heartbeat import Clock
from hemiola.runtime.serving.metrics import Board, Meter
from hemiola.runtime.serving.place import check_instances, check_place, ranks_of, take_place
from hemiola.runtime.serving.replies import Outlet, Replies, error_line
from hemiola.runtime.serving.response import string_tensor
from hemiola.runtime.serving.stream import OUTCOMES, Stream
from hemiola.runtime.serving.watchdog import Watchdog
from hemiola.runtime.text import LONG_TEXT

METRICS_S = 1.0
WATCHDOG_S = 1.0  # between looks for the process that ends this one with its server
NUM_COMPILING = 8  # requests whose grammars are compiled; others with a grammar wait for them
MOST_WAIT_S = 10.0  # so long
NUM_READING = 2  # long prompts and chats that are tokenized; other long ones wait for them
MAX_RETRY_S = 60


class Service:
    """Refused if the engine cannot be opened as Triton's config asks."""

    def __init__(
        self,
        open_llm: Callable[..., Any],
        config: Mapping[str, Any],  # Triton's
        folder: Path,  # of model.py
        kind: str,  # of the instance, and the number of its device
        device_id: int,
        labels: Mapping[str, str],
        metric_family: Any,
        outlet: Outlet,
    ) -> None:
        self._outlet = outlet
        self._watchdog = Watchdog()
        model, options = settings.read(folder, config["parameters"])
        check_instances(config["instance_group"])
        num_ranks = ranks_of(model.engine_dir)
        take_place(kind, device_id, model.device, num_ranks)
        progress = File(Path(model.progress_file)) if model.progress_file else True
        self.llm = open_llm(model.engine_dir, progress=progress, **options)
        check_place(model.engine_dir, self.llm.manifest.arch, kind, num_ranks)
        self._most_open = self.llm.config.max_rows + model.max_queue
        self._max_queue, self._min_priority, self._door_key = (
            model.max_queue,
            model.min_priority,
            model.door_key,
        )
        self.meter = Meter(self.llm.config.num_drafts, model.num_restarts)
        self.outbox = Replies(self.llm.abort, self.meter, outlet, model.log_requests)
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, "compiling")
        self._reading = ThreadPoolExecutor(NUM_READING, "reading")
        self._clocks: list[Clock] = []
        self._beat_file = Path(model.heartbeat_file)
        if model.heartbeat_file:  # before anything is asked of tritonserver, which may not answer
            home.hide(self._beat_file.parent)
            self._clock("heartbeat", heartbeat.BEAT_S, self._beat)
        self._board = Board(metric_family, dict(labels))
        self._clock("metrics", METRICS_S, lambda: self._board.post(self.meter.read(self.llm)))
        self._clock("watchdog", WATCHDOG_S, self._check_watchdog)
        gc.collect()
        gc.freeze()  # what stands is left alone: looking at all of it stopped every stream for 0.2 s

    def _clock(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        tell = self._outlet.log
        self._clocks.append(Clock(name, seconds, act, lambda *failed: tell(error_line(*failed))))

    def _check_watchdog(self) -> None:
        if self._watchdog.restart_if_lost():
            lost = f"this engine's watchdog process ended ({self._watchdog.num_lost} so far)"
            self._outlet.log(f"{lost}; started it again")

    def _beat(self) -> None:
        load = self.llm.load()
        outbox = self.outbox
        beat = heartbeat.now(load.stalled_s, outbox.stalled_s, outbox.num_open, load.failure)
        heartbeat.write(self._beat_file, beat)

    def take(self, request: Any, now: float) -> None:
        """A request of Triton's that came at this time."""
        sender = request.get_response_sender()
        self._answer(sender, wants_data(request), lambda: self._read(request, sender, now))

    def _answer(self, sender: Any, as_data: bool, work: Callable[[], None]) -> None:
        """If it cannot be done, the caller hears why."""
        try:
            work()
        except BaseException as error:  # a library's panic, too: nobody else would answer
            kind, text = kind_and_text(error, as_data)
            self.meter.ended(OUTCOMES.get(kind, "error"))
            self._outlet.fail(sender, kind, text)

    def _read(self, request: Any, sender: Any, now: float) -> None:
        check_id(request.request_id())
        asked = read_request(request)
        arrival = read_mark(asked.pop(ARRIVAL), self._door_key, now) if ARRIVAL in asked else now
        if "cancel" in asked:
            self._cancel(asked, sender)
        else:
            self._enqueue(Stream(request.request_id(), sender, ask := read_ask(asked), arrival), ask)

    def _enqueue(self, stream: Stream, ask: Ask) -> None:
        """What takes long is done by other threads: the next request does not wait for it."""
        check_priority(ask.params.priority, self._min_priority)
        if self._beat_file.name and ending.begun(self._beat_file):
            raise Lost(ending.REASON)
        self._check_room(ask.n)
        self.outbox.add(stream)
        try:
            self._begin(stream, ask)
        except BaseException:
            self.outbox.drop(stream)
            raise

    def _begin(self, stream: Stream, ask: Ask) -> None:
        as_data = ask.flags["error_data"]
        if ask.params.structured_outputs is not None:
            begun = time.monotonic()
            self._compiling.submit(
                self._answer, stream.sender, as_data, lambda: self._submit_guided(stream, ask, begun)
            )
        elif ask.messages is not None or (isinstance(ask.prompt, str) and len(ask.prompt) >= LONG_TEXT):
            self._reading.submit(self._answer, stream.sender, as_data, lambda: self._submit(stream, ask))
        else:
            self._submit(stream, ask)

    def _submit_guided(self, stream: Stream, ask: Ask, begun: float) -> None:
        """It has waited for the grammars of others; those that are waited for have a limit of their own."""
        waited_s = time.monotonic() - begun
        if waited_s > MOST_WAIT_S:
            self.outbox.drop(stream)
            raise Busy(f"grammars of other requests took {waited_s:.0f} s to compile; try again in 1 s")
        self._submit(stream, ask)

    def _submit(self, stream: Stream, ask: Ask) -> None:
        try:
            prompt = ask.prompt if ask.messages is None else self.llm.chat_text(ask.messages)
            stream.input_ids = self.llm.encode(prompt)
            self._check_scores(stream, ask)
            for branch, params in zip(stream.branches, ask.params.each_of(ask.n), strict=True):
                listener = self.outbox.listener(branch)
                branch.request_id = self.llm.submit(stream.input_ids, params, listener, stream.arrival)
        except BaseException:
            self.outbox.drop(stream)
            raise
        self.meter.taken(len(stream.input_ids))
        if stream.reason:  # before its ids were known
            self.outbox.abort(stream, stream.reason)

    def _check_scores(self, stream: Stream, ask: Ask) -> None:
        """Of a stream, each response has its own; they are not held."""
        num_ids, params = len(stream.input_ids), ask.params
        check_total(num_ids, 1, params.prompt_logprobs)
        if not ask.flags["stream"]:
            max_tokens = min(params.max_tokens, self.llm.config.max_len - num_ids)
            check_scores(max_tokens * ask.n, params.logprobs)

    def _check_room(self, n: int) -> None:
        """So many requests may run, and so many more wait."""
        num_open = self.outbox.num_open
        if num_open + n <= self._most_open:
            return
        wait = min(MAX_RETRY_S, max(1, math.ceil(self.outbox.seconds_per_answer * num_open / 2)))
        max_rows, max_queue = self.llm.config.max_rows, self._max_queue
        raise Busy(
            f"{counted(num_open, 'answer is', 'answers are')} under way in"
            f" {counted(max_rows, 'row', 'rows')}, and no more than"
            f" max_queue={max_queue} may wait; try again in {wait} s",
            retry_after_s=wait,
            max_rows=max_rows,
            max_queue=max_queue,
        )

    def _cancel(self, asked: dict[str, Any], sender: Any) -> None:
        """Dropping a gRPC stream cancels too, but can lock tritonserver 2.51 up while it writes to it."""
        if len(asked) > 1:
            others = ", ".join(name for name in asked if name != "cancel")
            message = f"a request with cancel has no other key, this one has {others}"
            raise Refused("conflict", "cancel", message=message, way_out="send two requests")
        self.outbox.cancel(asked["cancel"])
        self._outlet.send(sender, [string_tensor("finish_reason", ["cancelled"])], last=True)

    def close(self) -> None:
        gc.unfreeze()
        for clock in self._clocks:
            clock.stop()
        self.llm.close()
        self.outbox.close()
        self._board.close()
        if self._beat_file.name:
            heartbeat.remove(self._beat_file)
