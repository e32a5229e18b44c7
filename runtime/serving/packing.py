"""Requests as gRPC messages, and responses as pieces: what every client of the Triton model shares."""

import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hemiola.runtime.api import Logprob, Metrics, Piece, Prompt, PromptLogprobs, SamplingParams
from hemiola.runtime.errors import Name, Refused, one_line, shown
from hemiola.runtime.extra import install

try:
    from tritonclient.grpc import service_pb2
except ImportError as error:
    raise ImportError(f"hemiola.Client needs tritonclient; {install('client')}") from error

pb2: Any = service_pb2  # its classes are made when it is imported
# Of a channel. A server that was started again is found soon: grpc's own wait grows to two minutes.
# A connection of its own: a fork would try to use those of its parent, which grpc shares between channels.
CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)
NO_PROXY = ("grpc.enable_http_proxy", 0)
CANCEL = f"cancel-{uuid.uuid4().hex}"  # the id of every request that cancels another; no caller has it
CANCEL_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 256  # of one generate call
Message = dict[str, Any]  # output name -> str, or list of int
Chat = Sequence[Mapping[str, object]]  # messages, as OpenAI has them


def check_client(url: str, model: str, retries: int) -> None:
    """What a client is made with."""
    _checked("url", url)
    _checked("model", model)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise Refused("out_of_range", "retries", retries, way_out="give a whole number, 0 or more")


def channel_options(url: str) -> tuple[tuple[str, int], ...]:
    """Of a client: to its own machine it goes without the proxy that `http_proxy` names."""
    host = url.rpartition(":")[0]
    return (*CHANNEL, NO_PROXY) if host in ("localhost", "[::1]") or host.startswith("127.") else CHANNEL


def cancellation(model: str, request_id: str) -> Any:
    """A request that ends another."""
    request = pb2.ModelInferRequest(model_name=_checked("model", model), id=CANCEL)
    request.parameters["cancel"].string_param = _checked("request_id", request_id)
    return request


def _checked(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise Refused("wrong_type", name, text, way_out="give a text")
    encoded(name, text)
    return text


def encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = (Name(name), f" is not valid Unicode at character {error.start} (a lone surrogate)")
        raise Refused("malformed", name, message=message, way_out="remove it") from None


def pack(
    model: str,
    prompt: Prompt | Chat,
    params: SamplingParams,
    *,
    stream: bool,
    timeout_s: float | None = None,
    request_id: str | None = None,
) -> Any:
    """Lists travel as tensors, the rest as request parameters: those keep all 64 bits of a float."""
    if not isinstance(params, SamplingParams):
        raise Refused("wrong_type", "params", type(params), way_out="pass a SamplingParams")
    own_id = _checked("request_id", request_id) if request_id else uuid.uuid4().hex
    request = pb2.ModelInferRequest(model_name=_checked("model", model), id=own_id)
    if timeout_s is not None:
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 2**40:
            raise Refused("out_of_range", "timeout_s", timeout_s, way_out="give seconds, more than 0")
        request.parameters["timeout"].int64_param = max(1, round(timeout_s * 1e6))
    flags = {"stream": stream, "return_input_ids": not stream, "return_metrics": True, "error_data": True}
    for flag, value in flags.items():
        request.parameters[flag].bool_param = value
    if isinstance(prompt, str):
        add_strings(request, "text_input", [prompt])
    elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        way_out = "pass text (str) or a list of token ids"
        raise Refused("wrong_type", "prompt", type(prompt), way_out=way_out)
    elif len(prompt) and all(isinstance(message, Mapping) for message in prompt):
        add_strings(request, "messages", [_as_json(prompt)])
    else:
        add_ints(request, "input_ids", prompt)  # pyright: ignore[reportArgumentType]
    for name, value in params.checked().model_dump(exclude_unset=True, by_alias=True).items():
        match value:
            case _ if value in (None, (), "", {}):
                continue
            case dict() | ((tuple(), *_)):
                add_strings(request, name, [json.dumps(value)])
            case (str(), *_):
                add_strings(request, name, value)
            case tuple():
                add_ints(request, name, value)
            case str():
                add_strings(request, name, [value])
            case bool():
                request.parameters[name].bool_param = value
            case int() if name == "seed":  # its 64 bits, signed
                request.parameters[name].int64_param = value - (value >> 63 << 64)
            case int() if not -(2**63) <= value < 2**63:
                limit = "which needs more than 64 bits"
                raise Refused("out_of_range", name, value, limit, "give a smaller number")
            case int() if name == "priority":  # a parameter of that name is Triton's own
                add_ints(request, name, [value])
            case int():
                request.parameters[name].int64_param = value
            case float():
                request.parameters[name].double_param = value
    return request


def add_strings(request: Any, name: str, texts: Sequence[str]) -> None:
    content = [encoded(name, text) for text in texts]
    request.inputs.add(name=name, datatype="BYTES", shape=[len(content)])
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in content))


def _as_json(messages: object) -> str:
    try:
        return json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        why = one_line(error)
    except RecursionError:
        why = "nested too deeply"
    message = (Name("messages"), f" cannot be sent ({why})")
    raise Refused("malformed", "messages", message=message, way_out="give what JSON can say")


def add_ints(request: Any, name: str, values: Sequence[int]) -> None:
    try:
        content = struct.pack(f"<{len(values)}q", *values)
    except struct.error as error:
        large = [at for at, value in enumerate(values) if type(value) is int and abs(value) >= 2**63]
        if large and name == "input_ids":  # in the engine's words
            at = large[0]
            message = f"token id {shown(values[at])} at position {at} of the prompt is not in the vocabulary"
            raise Refused("out_of_range", "prompt", message=message) from None
        message, way_out = (Name(name), f" cannot be sent ({error})"), "pass token ids of the vocabulary"
        raise Refused("wrong_type", name, message=message, way_out=way_out) from None
    request.inputs.add(name=name, datatype="INT64", shape=[len(values)])
    request.raw_input_contents.append(content)


def unpack(response: Any) -> Message:
    """A response's tensors by name."""
    message: Message = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            message[output.name] = content[4:].decode()
        else:
            message[output.name] = np.frombuffer(content, "<i4").tolist()
    return message


def read_piece(message: Message) -> Piece:
    logprobs, metrics = message.get("logprobs"), message.get("metrics")
    of_prompt = message.get("prompt_logprobs")
    return Piece(
        text=message["text_output"],
        token_ids=message["output_ids"],
        logprobs=None if logprobs is None else [read_logprob(**entry) for entry in json.loads(logprobs)],
        finish_reason=message.get("finish_reason"),
        metrics=None if metrics is None else Metrics(**json.loads(metrics)),
        prompt_logprobs=None if of_prompt is None else read_prompt_logprobs(of_prompt),
    )


def read_prompt_logprobs(text: str) -> PromptLogprobs:
    """An entry after the other: each stands on a line of its own."""
    entries = map(json.loads, text[1:-1].split(",\n"))
    return [entry and read_logprob(**entry) for entry in entries]


def read_logprob(token_id: int, logprob: float, top: list[list[Any]]) -> Logprob:
    return Logprob(token_id, logprob, tuple((best, value) for best, value in top))
