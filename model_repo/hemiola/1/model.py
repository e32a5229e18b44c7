"""Hemiola in Triton's Python backend: request tensors to LLM.submit, pieces to response tensors; no more."""

import json
import os
import queue
import signal
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from hemiola.runtime.api import Logprob, Piece, SamplingParams
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.llm import LLM

CANCEL_CHECK_S = 0.1
PARENT_CHECK_S = 1.0
FLAGS = ("chat", "stream", "return_input_ids", "return_metrics")
SAMPLING = tuple(SamplingParams.model_fields)
KEYS = ("text_input", "input_ids", *FLAGS, *SAMPLING, "cancel")
LISTS = {"input_ids", "stop", "stop_token_ids", "bad_words", "cancel"}
JSON = {  # keys that are JSON texts, such as these
    "logit_bias": '{"5": -100}',
    "bad_words_ids": "[[5, 6]]",
    "structured_outputs": '{"regex": "[0-9]+"}',
}


class TritonPythonModel:
    """One engine. `execute` validates and enqueues, the LLM's thread computes, another one replies."""

    def initialize(self, args: dict[str, str]) -> None:
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
        try:
            options = read_options(json.loads(args["model_config"])["parameters"])
            self.llm = LLM(options.pop("engine_dir"), **options)
        except Refused as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.outbox = Replies(self.llm)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            try:
                self._take(request)
            except Exception as error:  # its caller cannot even be told; the others of the batch live on
                log_error(f"request {request.request_id()!r}", error)

    def _take(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            asked = read_request(request)
            if "cancel" in asked:
                self._cancel(asked, sender)
            else:
                self._enqueue(request.request_id(), read_ask(asked), sender)
        except Refused as error:
            send_error(sender, "INVALID_ARG", str(error))
        except Failed as error:
            send_error(sender, "UNAVAILABLE", str(error))
        except Exception as error:
            send_error(sender, "INTERNAL", f"{type(error).__name__}: {error}")

    def _enqueue(self, name: str, ask: "Ask", sender: Any) -> None:
        prompt = ask.prompt
        if ask.flags["chat"]:
            prompt = self.llm.chat_text([{"role": "user", "content": prompt}])
        stream = Stream(name, sender, ask.flags, self.llm.encode(prompt))
        self.outbox.add(stream)
        try:
            stream.request_id = self.llm.submit(
                stream.input_ids, ask.params, lambda piece: self.outbox.post(stream, piece)
            )
        except BaseException:
            self.outbox.drop(stream)
            raise
        if stream.aborted:  # before its id was known
            self.llm.abort(stream.request_id)

    def _cancel(self, asked: dict[str, Any], sender: Any) -> None:
        """Dropping a gRPC stream cancels too, but can lock tritonserver 2.51 up while it writes to it."""
        if len(asked) > 1:
            others = ", ".join(name for name in asked if name != "cancel")
            raise Refused(f"cancel stands alone, this request also has {others}; send two requests")
        self.outbox.cancel(asked["cancel"])
        done = pb_utils.InferenceResponse([string_tensor("finish_reason", "cancelled")])
        sender.send(done, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        self.llm.close()
        self.outbox.close()


def end_with_parent() -> None:
    """finalize never runs when the server is killed, and the backend's own watch for that can hang."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def read_options(parameters: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The model's parameters as LLM's arguments: numbers by their JSON spelling, the rest as text."""
    options: dict[str, Any] = {}
    for name, value in parameters.items():
        text = value["string_value"]
        if text.startswith("${"):
            raise Refused(
                f"parameter {name} of config.pbtxt is still {text}; fill it in, or start with `hemiola serve`"
            )
        try:
            options[name] = text if name == "engine_dir" else json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    if "engine_dir" not in options:
        raise Refused("config.pbtxt has no parameter engine_dir; add it, or start with `hemiola serve`")
    return options


class Ask(NamedTuple):
    """A request as far as it can be checked without the engine."""

    prompt: str | list[int]
    flags: dict[str, bool]
    params: SamplingParams


def read_request(request: Any) -> dict[str, Any]:
    """What the request says, in tensors and request parameters alike."""
    asked = {tensor.name(): read_tensor(tensor) for tensor in request.inputs()}
    for name, value in json.loads(request.parameters() or "{}").items():
        if name == "id":  # HTTP's generate repeats the request's id here
            continue
        if name not in KEYS:
            raise Refused(f"unknown key {name!r}; the keys are {', '.join(KEYS)}")
        if name in asked:
            raise Refused(f"{name} is both a tensor and a request parameter; give it once")
        asked[name] = [value] if name in LISTS else value
    if request.timeout():
        raise Refused(f"timeout is {request.timeout()} us, but none is served; cancel the stream instead")
    return asked


def read_ask(asked: dict[str, Any]) -> Ask:
    flags = {name: read_flag(name, asked.pop(name, False)) for name in FLAGS}
    asked.update({name: read_json(name, asked[name]) for name in JSON if name in asked})
    return Ask(read_prompt(asked, flags["chat"]), flags, SamplingParams(**asked))


def read_tensor(tensor: Any) -> Any:
    """A list or a single value, in Python's types."""
    name, values = tensor.name(), tensor.as_numpy().reshape(-1)
    if values.dtype == np.object_:
        content = [read_text(name, value) for value in values]
    elif values.dtype == np.float32:
        content = [float(str(value)) for value in values]  # 0.7 as the caller wrote it, not 0.699999988
    else:
        content = values.tolist()
    return content if name in LISTS else content[0]


def read_text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Refused(
            f"{name} is not UTF-8 ({error.reason} at byte {error.start}); send UTF-8 or input_ids"
        ) from None


def read_json(name: str, text: object) -> object:
    """JSON has text for keys only, and token ids are keys of logit_bias."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
        if name == "logit_bias" and isinstance(value, dict):
            value = {int(key): bias for key, bias in value.items()}
    except (ValueError, RecursionError):
        value = None
    if value is None:
        raise Refused(f"{name} is {str(text)[:80]!r}; give a text that is JSON, such as {JSON[name]}")
    return value


def read_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"{name} is {value!r}; give true or false")
    return value


def read_prompt(asked: dict[str, Any], chat: bool) -> str | list[int]:
    """Takes text_input or input_ids out of `asked`."""
    text, ids = asked.pop("text_input", None), asked.pop("input_ids", None)
    if (text is None) == (ids is None):
        given = "neither" if text is None else "both"
        raise Refused(f"a request has either text_input or input_ids, this one has {given}; give one of them")
    if chat and text is None:
        raise Refused("chat makes text_input a user's message, this request has input_ids; give text_input")
    return ids if text is None else text


class Stream:
    """One request on its way out: what the engine has said and nobody has sent yet."""

    def __init__(self, name: str, sender: Any, flags: dict[str, bool], input_ids: list[int]) -> None:
        self.name = name  # the caller's id, "" if none
        self.sender = sender
        self.flags = flags
        self.input_ids = input_ids
        self.request_id: int | None = None  # known once submit has returned
        self.said: deque[Piece] = deque()
        self.num_output_tokens = 0
        self.aborted = False


class Replies:
    """Sends from a thread of its own, since one send is a round trip of 0.2 ms to the server's process.

    All that a request said while the thread was busy becomes one response: a slow server makes longer pieces,
    not a slower engine. The same thread looks for callers that went away.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._open: dict[int, Stream] = {}  # by Python's id
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        self._open[id(stream)] = stream

    def drop(self, stream: Stream) -> None:
        self._open.pop(id(stream), None)

    def post(self, stream: Stream, piece: Piece) -> None:
        """Called by the engine's thread for every piece; never waits."""
        stream.said.append(piece)
        if stream.flags["stream"] or piece.finish_reason:
            self._ready.put(stream)

    def cancel(self, names: list[str]) -> None:
        """End requests by their callers' ids; those that have ended already are left alone."""
        for stream in list(self._open.values()):
            if stream.name in names and stream.name:
                self._abort(stream)

    def close(self) -> None:
        """Sends what has been said and ends the thread."""
        self._ready.put(None)
        self._thread.join()

    def _run(self) -> None:
        next_check = time.monotonic() + CANCEL_CHECK_S
        while True:
            try:
                stream = self._ready.get(timeout=max(0.0, next_check - time.monotonic()))
                if stream is None:
                    return
                self._send(stream)
            except queue.Empty:
                pass
            if time.monotonic() >= next_check:
                self._check_cancelled()
                next_check = time.monotonic() + CANCEL_CHECK_S

    def _send(self, stream: Stream) -> None:
        pieces = [stream.said.popleft() for _ in range(len(stream.said))]
        if not pieces:
            return  # an earlier turn took this piece along
        last = pieces[-1]
        stream.num_output_tokens += sum(len(piece.token_ids) for piece in pieces)
        if last.finish_reason:
            self.drop(stream)
        try:
            if last.finish_reason == "cancelled":
                send_error(stream.sender, "CANCELLED", "the request was cancelled")
            elif last.finish_reason == "error":
                send_error(stream.sender, "INTERNAL", last.error or "the engine failed")
            else:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last.finish_reason else 0
                stream.sender.send(pb_utils.InferenceResponse(tensors(stream, pieces)), flags=flags)
        except Exception as error:  # one stream's trouble: the thread serves the others
            log_error(f"request {stream.request_id}", error)
            if not last.finish_reason:
                self._abort(stream)

    def _check_cancelled(self) -> None:
        for stream in list(self._open.values()):
            if stream.request_id is not None and not stream.aborted and is_cancelled(stream):
                self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        """The engine answers with a last piece, which ends the stream. No id yet: _enqueue aborts it."""
        stream.aborted = True
        if stream.request_id is not None:
            self._llm.abort(stream.request_id)


def is_cancelled(stream: Stream) -> bool:
    """Whether the caller left; a sender that cannot tell has nobody to send to."""
    try:
        return stream.sender.is_cancelled()
    except Exception as error:
        log_error(f"request {stream.request_id}", error)
        return True


def tensors(stream: Stream, pieces: list[Piece]) -> list[Any]:
    """One response that says all of these pieces."""
    last = pieces[-1]
    out = [
        string_tensor("text_output", "".join(piece.text for piece in pieces)),
        int_tensor("output_ids", [token_id for piece in pieces for token_id in piece.token_ids]),
    ]
    logprobs: list[Logprob] = [logprob for piece in pieces for logprob in piece.logprobs or ()]
    if logprobs:
        out.append(string_tensor("logprobs", json.dumps([logprob._asdict() for logprob in logprobs])))
    if last.finish_reason:
        out += [
            string_tensor("finish_reason", last.finish_reason),
            int_tensor("num_input_tokens", [len(stream.input_ids)]),
            int_tensor("num_output_tokens", [stream.num_output_tokens]),
        ]
        if stream.flags["return_input_ids"]:
            out.append(int_tensor("input_ids", stream.input_ids))
        if stream.flags["return_metrics"] and last.metrics is not None:
            out.append(string_tensor("metrics", json.dumps(asdict(last.metrics))))
    return out


def string_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def int_tensor(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))


def send_error(sender: Any, code: str, message: str) -> None:
    """HTTP answers 400 to every code and gRPC hides it, so the message carries it."""
    error = pb_utils.TritonError(f"[{code}] {message}", getattr(pb_utils.TritonError, code))
    sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def log_error(where: str, error: Exception) -> None:
    pb_utils.Logger.log_error(f"{where}: {type(error).__name__}: {error}")
