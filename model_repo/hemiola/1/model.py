"""Hemiola in Triton's Python backend: request tensors to LLM.submit, pieces to response tensors; no more."""

import contextlib
import gc
import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from hemiola.runtime.api import Logprob, Piece
from hemiola.runtime.errors import Busy, Refused, counted
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving import heartbeat, settings
from hemiola.runtime.serving.arrival import NAME as ARRIVAL
from hemiola.runtime.serving.arrival import read_mark
from hemiola.runtime.serving.ask import Ask, check_priority, read_ask, read_request, wants_data
from hemiola.runtime.serving.error_text import kind_of, text_of
from hemiola.runtime.serving.heartbeat import Clock
from hemiola.runtime.serving.log import Printer
from hemiola.runtime.serving.metrics import Board, Meter, Outcome
from hemiola.runtime.serving.place import check_instances, check_place, take_place
from hemiola.runtime.serving.stream import Branch, Failure, Reason, Stream, error_of, line_of, outcome_of
from hemiola.runtime.serving.watchdog import Watchdog
from hemiola.runtime.text import LONG_TEXT

CHECK_S = 0.1  # between looks for callers that left and requests whose time is over
METRICS_S = 1.0
WATCHDOG_S = 1.0  # between looks for the process that ends this one with its server
NUM_COMPILING = 8  # requests whose grammars are compiled; others with a grammar wait for them
NUM_READING = 2  # long prompts and chats that are tokenized; other long ones wait for them
MOST_RETRY_S = 60
OUTCOMES: dict[str, Outcome] = {"INVALID_ARG": "invalid", "OVERLOADED": "rejected"}  # by kind of error


class TritonPythonModel:
    """One engine. `execute` validates and enqueues, the LLM's thread computes, another one replies."""

    def initialize(self, args: dict[str, str]) -> None:
        close_inherited_sockets()
        self._watchdog = Watchdog()
        folder = Path(args["model_repository"], args["model_version"])
        try:
            config, kind = json.loads(args["model_config"]), args["model_instance_kind"]
            own, options = settings.read(folder, config["parameters"])
            check_instances(config["instance_group"])
            take_place(kind, int(args["model_instance_device_id"]), own.device)
            self.llm = LLM(own.engine_dir, **options)
            check_place(own.engine_dir, self.llm.manifest.arch, kind)
        except Refused as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._most_open = self.llm.config.max_rows + own.max_queue
        self._max_queue, self._min_priority, self._door_key = own.max_queue, own.min_priority, own.door_key
        self.meter = Meter(self.llm.config.num_drafts, own.num_restarts)
        self.outbox = Replies(self.llm, self.meter, own.log_requests)
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, "compiling")
        self._reading = ThreadPoolExecutor(NUM_READING, "reading")
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._board = Board(pb_utils.MetricFamily, labels)
        self._clocks = [
            Clock("metrics", METRICS_S, lambda: self._board.post(self.meter.read(self.llm)), log_error),
            Clock("watchdog", WATCHDOG_S, self._check_watchdog, log_error),
        ]
        self._beat_file = Path(own.heartbeat_file)
        if own.heartbeat_file:
            self._clocks.append(Clock("heartbeat", heartbeat.BEAT_S, self._beat, log_error))
        gc.collect()
        gc.freeze()  # what stands is left alone: looking at all of it stopped every stream for 0.2 s

    def _check_watchdog(self) -> None:
        if self._watchdog.restart_if_lost():
            lost = f"this engine's watchdog process ended ({self._watchdog.num_lost} so far)"
            pb_utils.Logger.log_error(f"{lost}; started it again")

    def _beat(self) -> None:
        load = self.llm.load()
        outbox = self.outbox
        beat = heartbeat.now(load.stalled_s, outbox.stalled_s, outbox.num_open, load.failure)
        heartbeat.write(self._beat_file, beat)

    def execute(self, requests: list[Any]) -> None:
        now = time.perf_counter()
        for request in requests:
            try:
                self._take(request, now)
            except Exception as error:  # its caller cannot even be told; the others of the batch live on
                log_error(f"request {request.request_id()!r}", error)

    def _take(self, request: Any, now: float) -> None:
        sender = request.get_response_sender()
        self._answer(sender, wants_data(request), lambda: self._read(request, sender, now))

    def _answer(self, sender: Any, as_data: bool, work: Callable[[], None]) -> None:
        """If it cannot be done, the caller hears why."""
        try:
            work()
        except Exception as error:
            kind = kind_of(error)
            self.meter.ended(OUTCOMES.get(kind, "error"))
            send_error(sender, kind, text_of(error, as_data))

    def _read(self, request: Any, sender: Any, now: float) -> None:
        asked = read_request(request)
        arrival = read_mark(asked.pop(ARRIVAL), self._door_key, now) if ARRIVAL in asked else now
        if "cancel" in asked:
            self._cancel(asked, sender)
        else:
            self._enqueue(Stream(request.request_id(), sender, ask := read_ask(asked), arrival), ask)

    def _enqueue(self, stream: Stream, ask: Ask) -> None:
        """What takes long is done by other threads: the next request does not wait for it."""
        check_priority(ask.params.priority, self._min_priority)
        self._check_room(ask.n)
        self.outbox.add(stream)
        as_data = ask.flags["error_data"]
        if ask.params.structured_outputs is not None:
            self._compiling.submit(self._answer, stream.sender, as_data, lambda: self._submit(stream, ask))
        elif ask.messages is not None or (isinstance(ask.prompt, str) and len(ask.prompt) >= LONG_TEXT):
            self._reading.submit(self._answer, stream.sender, as_data, lambda: self._submit(stream, ask))
        else:
            self._submit(stream, ask)

    def _submit(self, stream: Stream, ask: Ask) -> None:
        try:
            prompt = ask.prompt if ask.messages is None else self.llm.chat_text(ask.messages)
            stream.input_ids = self.llm.encode(prompt)
            for branch, params in zip(stream.branches, ask.params.each_of(ask.n), strict=True):
                listener = self.outbox.listener(branch)
                branch.request_id = self.llm.submit(stream.input_ids, params, listener, stream.arrival)
        except BaseException:
            self.outbox.drop(stream)
            raise
        self.meter.taken(len(stream.input_ids))
        if stream.reason:  # before its ids were known
            self.outbox.abort(stream, stream.reason)

    def _check_room(self, n: int) -> None:
        """So many requests may run, and so many more wait."""
        num_open = self.outbox.num_open
        if num_open + n <= self._most_open:
            return
        wait = min(MOST_RETRY_S, max(1, math.ceil(self.outbox.seconds_per_answer * num_open / 2)))
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
            said = f"cancel stands alone, this request also has {others}"
            raise Refused("conflict", "cancel", said=said, way_out="send two requests")
        self.outbox.cancel(asked["cancel"])
        done = pb_utils.InferenceResponse([string_tensor("finish_reason", ["cancelled"])])
        sender.send(done, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        gc.unfreeze()
        for clock in self._clocks:
            clock.stop()
        self.llm.close()
        self.outbox.close()
        self._board.close()
        if self._beat_file.name:
            heartbeat.remove(self._beat_file)


def close_inherited_sockets() -> None:
    """An engine that is loaded later is forked with the server's connections, and would keep them open."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(fd)


class Replies:
    """Sends from a thread of its own, since one send is a round trip of 0.2 ms to the server's process.

    All that a request said while the thread was busy becomes one response: a slow server makes longer pieces,
    not a slower engine. The same thread looks for callers that went away.
    """

    def __init__(self, llm: LLM, meter: Meter, log_requests: bool = False) -> None:
        self._llm = llm
        self._meter = meter
        self._log_requests = log_requests
        self._printer = Printer()
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._open: dict[int, Stream] = {}  # by Python's id
        self._ends: deque[float] = deque(maxlen=32)  # when the last answers ended
        self._sending = math.inf  # since when
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return sum(len(stream.branches) for stream in list(self._open.values()))

    @property
    def stalled_s(self) -> float:
        """For so long the server has not taken an answer."""
        return max(0.0, time.monotonic() - self._sending)

    @property
    def seconds_per_answer(self) -> float:
        ends = list(self._ends)
        return (time.monotonic() - ends[0]) / len(ends) if ends else 1.0

    def add(self, stream: Stream) -> None:
        self._open[id(stream)] = stream

    def drop(self, stream: Stream) -> None:
        """Nobody waits for it any more."""
        self._open.pop(id(stream), None)
        self.abort(stream)

    def listener(self, branch: Branch) -> Any:
        """An on_piece."""
        return lambda piece: self.post(branch, piece)

    def post(self, branch: Branch, piece: Piece) -> None:
        """Called by the engine's thread for every piece; never waits."""
        stream = branch.stream
        if piece.token_ids:
            now = time.perf_counter()
            if branch.last_said:
                self._meter.later(now - branch.last_said, len(piece.token_ids))
            else:
                self._meter.first(now - stream.arrival)
            branch.last_said = now
            if now > stream.deadline and piece.finish_reason is None and not stream.aborted:
                self.abort(stream, "timeout")
        branch.said.append(piece)
        stream.num_running -= piece.finish_reason is not None
        if stream.flags["stream"] or not stream.num_running:
            self._ready.put(stream)

    def cancel(self, names: list[str]) -> None:
        """End requests by their callers' ids; those that have ended already are left alone."""
        for stream in list(self._open.values()):
            if stream.name in names and stream.name:
                self.abort(stream)

    def abort(self, stream: Stream, reason: Reason = "cancelled") -> None:
        """The engine answers with last pieces, which end the stream. No id yet: _submit aborts it."""
        stream.end(reason)
        for branch in stream.branches:
            if branch.request_id is not None:
                self._llm.abort(branch.request_id)

    def close(self) -> None:
        """Sends what has been said and ends the thread."""
        self._ready.put(None)
        self._thread.join()
        self._printer.flush()

    def _run(self) -> None:
        next_check = time.monotonic() + CHECK_S
        while True:
            try:
                stream = self._ready.get(timeout=max(0.0, next_check - time.monotonic()))
                if stream is None:
                    return
                self._sending = time.monotonic()
                self._send(stream)
            except queue.Empty:
                pass
            if time.monotonic() >= next_check:
                self._sending = time.monotonic()
                self._check()
                next_check = time.monotonic() + CHECK_S
            self._sending = math.inf

    def _send(self, stream: Stream) -> None:
        said = [[b.said.popleft() for _ in range(len(b.said))] for b in stream.branches]
        if not any(said) or id(stream) not in self._open:
            return  # an earlier turn took this piece along
        over = all(pieces and pieces[-1].finish_reason for pieces in said)
        failure = self._end(stream, [pieces[-1] for pieces in said]) if over else None
        try:
            if failure is not None:
                send_error(stream.sender, *failure)
            else:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if over else 0
                stream.sender.send(pb_utils.InferenceResponse(tensors(stream, said, over)), flags=flags)
        except Exception as error:  # one stream's trouble: the thread serves the others
            log_error(f"request {stream.branches[0].request_id}", error)
            if not over:
                self.abort(stream)

    def _end(self, stream: Stream, lasts: list[Piece]) -> Failure | None:
        self._open.pop(id(stream), None)
        self._ends.append(time.monotonic())
        failure = error_of(stream, lasts)
        outcome = outcome_of(stream, failure)
        self._meter.ended(outcome)
        for last in lasts:
            if last.metrics is not None:
                self._meter.measured(last.metrics, whole=outcome == "success")
        if self._log_requests:
            self._printer.say(f"{line_of(stream, lasts, outcome)}\n")
        return failure

    def _check(self) -> None:
        """Callers that went away, and requests whose time is over."""
        now = time.perf_counter()
        for stream in list(self._open.values()):
            if stream.aborted:
                continue
            if now > stream.deadline:
                self.abort(stream, "timeout")
            elif is_cancelled(stream):
                self.abort(stream)


def is_cancelled(stream: Stream) -> bool:
    """Whether the caller left; a sender that cannot tell has nobody to send to."""
    try:
        return stream.sender.is_cancelled()
    except Exception as error:
        log_error(f"request {stream.branches[0].request_id}", error)
        return True


def tensors(stream: Stream, said: list[list[Piece]], over: bool) -> list[Any]:
    """One response that says all of these pieces, those of each branch."""
    texts = ["".join(piece.text for piece in pieces) for pieces in said]
    texts, stream.echo = [stream.echo + text for text in texts], ""
    ids = [[token_id for piece in pieces for token_id in piece.token_ids] for pieces in said]
    for branch, own in zip(stream.branches, ids, strict=True):
        branch.num_tokens += len(own)
    out = [string_tensor("text_output", texts), int_tensor("output_ids", list(chain(*ids)))]
    logprobs = [[logprob for piece in pieces for logprob in piece.logprobs or ()] for pieces in said]
    out += logprob_tensors(stream, logprobs, over)
    if over:
        lasts = [pieces[-1] for pieces in said]
        reasons = [
            "timeout" if last.finish_reason == "cancelled" else str(last.finish_reason) for last in lasts
        ]
        out += [
            string_tensor("finish_reason", reasons),
            int_tensor("num_input_tokens", [len(stream.input_ids)]),
            int_tensor("num_output_tokens", [branch.num_tokens for branch in stream.branches]),
        ]
        if stream.flags["return_input_ids"]:
            out.append(int_tensor("input_ids", stream.input_ids))
        if stream.flags["return_metrics"]:
            found = [json.dumps(asdict(last.metrics)) for last in lasts if last.metrics is not None]
            out.append(string_tensor("metrics", found))
    return out


def logprob_tensors(stream: Stream, logprobs: list[list[Logprob]], over: bool) -> list[Any]:
    """Ours, and TensorRT-LLM's."""
    if not any(logprobs) and not (over and stream.flags["return_log_probs"]):
        return []
    if not stream.flags["return_log_probs"]:
        found = [json.dumps([logprob._asdict() for logprob in own]) for own in logprobs]
        return [string_tensor("logprobs", found)]
    for branch, own in zip(stream.branches, logprobs, strict=True):
        branch.cum_logprob += sum(logprob.logprob for logprob in own)
    out = [float_tensor("output_log_probs", [logprob.logprob for own in logprobs for logprob in own])]
    if over:
        out.append(float_tensor("cum_log_probs", [branch.cum_logprob for branch in stream.branches]))
    return out


def string_tensor(name: str, texts: list[str]) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode() for text in texts], dtype=np.object_))


def int_tensor(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))


def float_tensor(name: str, values: list[float]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.float32))


def send_error(sender: Any, code: str, message: str) -> None:
    """HTTP answers 400 to every code and gRPC hides it, so the message carries it."""
    kind = "UNAVAILABLE" if code == "OVERLOADED" else code
    error = pb_utils.TritonError(f"[{code}] {message}", getattr(pb_utils.TritonError, kind))
    sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def log_error(where: str, error: Exception) -> None:
    pb_utils.Logger.log_error(f"{where}: {type(error).__name__}: {error}")
