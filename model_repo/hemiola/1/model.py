"""Hemiola in Triton's Python backend: request tensors to LLM.submit, pieces to response tensors, nothing else."""

import json
import queue
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.request import Piece, SamplingParams

CANCEL_CHECK_S = 0.1
PROMPT = {"text_input", "input_ids", "chat", "stream"}
SAMPLING = {
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "ignore_eos", "logprobs",
}  # fmt: skip
LISTS = {"input_ids", "stop", "stop_token_ids"}


class TritonPythonModel:
    """One engine. `execute` only validates and enqueues; the LLM's thread computes; the outbox's thread answers."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            options = read_options(json.loads(args["model_config"])["parameters"])
            self.llm = LLM(options.pop("engine_dir"), **options)
        except Refused as error:
            raise pb_utils.TritonModelException(f"[INVALID_ARG] {error}") from None
        self.outbox = Outbox(self.llm)

    def execute(self, requests: list) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Refused as error:
                send_error(sender, "INVALID_ARG", str(error))
            except Exception as error:  # this request's trouble only: the others live on
                send_error(sender, "INTERNAL", f"{type(error).__name__}: {error}")

    def _accept(self, request: Any, sender: Any) -> None:
        asked = read_request(request)
        prompt = read_prompt(asked, self.llm)
        stream = Stream(sender, each=asked.pop("stream", False))
        params = SamplingParams(**{name: value for name, value in asked.items() if name in SAMPLING})
        self.outbox.add(stream)
        try:
            stream.request_id = self.llm.submit(prompt, params, lambda piece: self.outbox.post(stream, piece))
        except BaseException:
            self.outbox.drop(stream)
            raise

    def finalize(self) -> None:
        self.llm.close()
        self.outbox.close()


def read_options(parameters: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The model's parameters as LLM's arguments: numbers and booleans by their JSON spelling, the rest as text."""
    options: dict[str, Any] = {}
    for name, value in parameters.items():
        text = value["string_value"]
        if text.startswith("${"):
            raise Refused(f"parameter {name} of config.pbtxt is still {text}; fill it in, or start with `hemiola serve`")
        try:
            options[name] = text if name == "engine_dir" else json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    if "engine_dir" not in options:
        raise Refused("config.pbtxt has no parameter engine_dir; add it, or start with `hemiola serve`")
    return options


def read_request(request: Any) -> dict[str, Any]:
    """Everything the request says, from tensors and request parameters alike."""
    asked = {tensor.name(): read_tensor(tensor) for tensor in request.inputs()}
    for name, value in json.loads(request.parameters() or "{}").items():
        if name == "id":  # HTTP generate repeats the request's id here
            continue
        if name not in PROMPT | SAMPLING:
            known = ", ".join(sorted(PROMPT | SAMPLING))
            raise Refused(f"unknown key {name!r}; known keys are {known}")
        if name in asked:
            raise Refused(f"{name} is given twice, as a tensor and as a request parameter; give it once")
        asked[name] = [value] if name in LISTS else value
    if request.timeout():
        raise Refused(f"timeout is {request.timeout()} us, but timeouts are not served; close the stream to cancel it")
    return asked


def read_tensor(tensor: Any) -> Any:
    name, values = tensor.name(), tensor.as_numpy().reshape(-1)
    if values.dtype == np.object_:
        try:
            content = [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise Refused(f"{name} is not UTF-8 ({error.reason} at byte {error.start}); send UTF-8 or input_ids") from None
    elif values.dtype == np.float32:
        content = [float(str(value)) for value in values]  # 0.7 as the caller wrote it, not 0.699999988
    else:
        content = values.tolist()
    return content if name in LISTS else content[0]


def read_prompt(asked: dict[str, Any], llm: LLM) -> str | list[int]:
    """Takes the prompt's keys out of `asked`, except `stream`."""
    text, ids, chat = asked.pop("text_input", None), asked.pop("input_ids", None), asked.pop("chat", False)
    for name, value in (("chat", chat), ("stream", asked.get("stream", False))):
        if not isinstance(value, bool):
            raise Refused(f"{name} is {value!r}; give true or false")
    if (text is None) == (ids is None):
        given = "neither" if text is None else "both"
        raise Refused(f"a request needs either text_input or input_ids, this one has {given}")
    if chat and text is None:
        raise Refused("chat wraps text_input, this request has input_ids; leave chat out or send text_input")
    if chat:
        return llm.chat_text([{"role": "user", "content": text}])
    return ids if text is None else text


class Stream:
    """One request on its way out: what the engine has said and the outbox has not sent."""

    def __init__(self, sender: Any, each: bool) -> None:
        self.sender = sender
        self.each = each  # a response for each piece, or one for all
        self.request_id: int | None = None  # known once submit has returned
        self.said: deque[Piece] = deque()
        self.num_output_tokens = 0
        self.aborted = False


class Outbox:
    """Sends from a thread of its own, since one send is a round trip of 0.2 ms to the server's process.

    All that a request said while the thread was busy becomes one response, so a slow server means longer pieces,
    not a slower engine. The same thread looks for callers that went away.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._open: dict[int, Stream] = {}  # by id()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        self._open[id(stream)] = stream

    def drop(self, stream: Stream) -> None:
        self._open.pop(id(stream), None)

    def post(self, stream: Stream, piece: Piece) -> None:
        """Called by the engine's thread for every piece; never waits."""
        stream.said.append(piece)
        if stream.each or piece.finish_reason:
            self._ready.put(stream)

    def close(self) -> None:
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
                send_error(stream.sender, "INTERNAL", last.text)
            else:
                stream.sender.send(
                    pb_utils.InferenceResponse(response_tensors(stream, pieces)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last.finish_reason else 0,
                )
        except Exception as error:  # one stream's trouble; the thread serves the others
            pb_utils.Logger.log_error(f"request {stream.request_id}: {type(error).__name__}: {error}")
            self._abort(stream)

    def _check_cancelled(self) -> None:
        for stream in list(self._open.values()):
            if stream.request_id is not None and not stream.aborted and stream.sender.is_cancelled():
                self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        """The engine answers with a last piece, which ends the stream."""
        stream.aborted = True
        if stream.request_id is not None:
            self._llm.abort(stream.request_id)


def response_tensors(stream: Stream, pieces: list[Piece]) -> list:
    last = pieces[-1]
    tensors = [
        string_tensor("text_output", "".join(piece.text for piece in pieces)),
        int_tensor("output_ids", [token_id for piece in pieces for token_id in piece.token_ids]),
    ]
    if last.logprobs is not None:
        logprobs = [entry for piece in pieces for entry in piece.logprobs]
        tensors.append(string_tensor("logprobs", json.dumps(logprobs)))
    if last.finish_reason:
        tensors += [
            string_tensor("finish_reason", last.finish_reason),
            int_tensor("num_input_tokens", [last.metrics["prompt_tokens"]]),
            int_tensor("num_output_tokens", [stream.num_output_tokens]),
        ]
    return tensors


def string_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def int_tensor(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))


def send_error(sender: Any, code: str, message: str) -> None:
    """HTTP shows every code as 400 and gRPC hides it, so the message carries it too."""
    error = pb_utils.TritonError(f"[{code}] {message}", getattr(pb_utils.TritonError, code))
    sender.send(
        pb_utils.InferenceResponse(error=error),
        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )
