"""The LLM's calls over Triton gRPC, with the same types."""

import json
import struct
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import numpy as np

from hemiola.runtime.api import Logprob, Metrics, Output, Piece, Prompt, SamplingParams
from hemiola.runtime.errors import Busy, Cancelled, Failed, Refused

try:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc
except ImportError as error:
    raise ImportError("hemiola.Client needs tritonclient; pip install 'hemiola[client]'") from error

pb2: Any = service_pb2  # its classes are made when it is imported
MAX_IN_FLIGHT = 256  # of one generate call
READY_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 10.0
KINDS: dict[str, type[Exception]] = {
    "[INVALID_ARG]": Refused,
    "[UNAVAILABLE]": Failed,
    "[OVERLOADED]": Busy,
    "[CANCELLED]": Cancelled,
}
CANCEL = "cancel"  # the id of every request that cancels another
Message = dict[str, Any]  # output name -> str, or list of int


class Client:
    """A model on a running `hemiola serve`. One connection; every request is a gRPC stream of its own."""

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "hemiola") -> None:
        self.url = url
        self.model = model
        self._channel = grpc.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._calls: WeakSet[Exchange] = WeakSet()  # for close
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        try:
            asked = pb2.ModelReadyRequest(name=self.model)
            if self._stub.ModelReady(asked, timeout=READY_TIMEOUT_S).ready:
                return
            index = self._stub.RepositoryIndex(pb2.RepositoryIndexRequest(), timeout=READY_TIMEOUT_S)
        except grpc.RpcError as error:
            raise Refused(
                f"no server answers at {self.url} ({error.details()});"
                f" start `hemiola serve`, or pass the gRPC address that it printed"
            ) from None
        names = ", ".join(model.name for model in index.models) or "none"
        raise Refused(
            f"the server at {self.url} has no model {self.model!r} that is ready (it has {names});"
            f" pass one of its models"
        )

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """All outputs, in the order of the prompts. One that fails raises; the others are cancelled."""
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise Refused(f"prompts is {type(prompts).__name__}; pass a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise Refused(
                f"{len(prompts)} prompts and {len(params)} SamplingParams; pass one each, or one for all"
            )
        requests = [pack(self.model, *pair, stream=False) for pair in zip(prompts, params, strict=True)]
        outputs: list[Output] = []
        calls: deque[Exchange] = deque()
        try:
            for request in requests:
                if len(calls) == MAX_IN_FLIGHT:
                    outputs.append(read_output(calls[0]))
                    calls.popleft()
                calls.append(self._call(request))
            outputs += map(read_output, calls)
        finally:
            end(calls)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces as they come. The request starts now; a caller that stops reading cancels it."""
        request = pack(self.model, prompt, params or SamplingParams(), stream=True)
        return Pieces(self._call(request))

    def _call(self, request: Any) -> "Exchange":
        call = Exchange(self._stub, self.url, request)
        self._calls.add(call)
        return call

    def close(self) -> None:
        """Cancels what is in flight and ends the connection."""
        end(list(self._calls))
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Exchange:
    """One request on a gRPC stream of its own, which is always read to its end.

    tritonserver 2.51 can lock up when a gRPC stream is dropped while it writes to it, and keeps a request
    alive for ever when that write is the last. So a request is cancelled by a second one on the same stream.
    """

    def __init__(self, stub: Any, url: str, request: Any) -> None:
        self._url = url
        self._request = request
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # None ends our half of the stream
        self._outgoing.put(request)
        self._incoming = stub.ModelStreamInfer(iter(self._outgoing.get, None))
        self._lock = threading.Lock()  # `read` may be called by the reader and by `Client.close`
        self.ended = False

    def messages(self) -> Iterator[Message]:
        """The responses. The last is given out when the stream has ended."""
        last: Message | None = None
        failure = ""
        while (response := self.read()) is not None:
            if response.infer_response.id == CANCEL:
                continue
            message = unpack(response.infer_response)
            failure = failure or response.error_message
            if failure or "finish_reason" in message:
                last = message
                self._outgoing.put(None)
            else:
                yield message
        if failure:
            raise refusal(failure)
        if last is None:
            raise RuntimeError(f"the server at {self._url} ended the stream before the request was finished")
        yield last

    def read(self) -> Any:
        """The next response, or None at the stream's end."""
        with self._lock:
            if self.ended:
                return None
            try:
                return next(self._incoming)
            except StopIteration:
                self.ended = True
                return None
            except grpc.RpcError as error:
                self.ended = True
                raise RuntimeError(
                    f"the server at {self._url}: {error.code().name}: {error.details()}"
                ) from None
            finally:
                if self.ended:
                    self._outgoing.put(None)

    def cancel(self) -> None:
        """Ask the server to end the request; the stream then ends soon."""
        request = pb2.ModelInferRequest(model_name=self._request.model_name, id=CANCEL)
        request.parameters["cancel"].string_param = self._request.id
        self._outgoing.put(request)
        self._outgoing.put(None)

    def drain(self) -> None:
        """Read to the end; a server that does not answer is left alone."""
        give_up = threading.Timer(CANCEL_TIMEOUT_S, self._incoming.cancel)
        give_up.start()
        try:
            while self.read() is not None:
                pass
        except RuntimeError:
            pass
        finally:
            give_up.cancel()


def end(calls: Iterable[Exchange]) -> None:
    """Cancel those that are still running."""
    running = [call for call in calls if not call.ended]
    for call in running:
        call.cancel()
    for call in running:
        call.drain()


class Pieces(Iterator[Piece]):
    """A request's pieces. Leaving a loop over them early cancels the request."""

    def __init__(self, call: Exchange) -> None:
        self._call = call
        self._messages = call.messages()

    def __next__(self) -> Piece:
        return read_piece(next(self._messages))

    def close(self) -> None:
        end([self._call])

    def __del__(self) -> None:
        self.close()


def read_output(call: Exchange) -> Output:
    (message,) = call.messages()
    piece = read_piece(message)
    assert piece.finish_reason is not None and piece.metrics is not None
    return Output(
        prompt_token_ids=message["input_ids"],
        token_ids=piece.token_ids,
        text=piece.text,
        finish_reason=piece.finish_reason,
        logprobs=piece.logprobs,
        metrics=piece.metrics,
    )


def refusal(message: str) -> Exception:
    """A server's message as the error that LLM would have raised."""
    code, _, text = message.partition("] ")
    kind = KINDS.get(f"{code}]")
    return kind(text) if kind else RuntimeError(message)


def pack(model: str, prompt: Prompt, params: SamplingParams, *, stream: bool) -> Any:
    """Lists travel as tensors, the rest as request parameters: those keep all 64 bits of a float."""
    if not isinstance(params, SamplingParams):
        raise Refused(f"params is {type(params).__name__}; pass a SamplingParams")
    request = pb2.ModelInferRequest(model_name=model, id=uuid.uuid4().hex)
    for flag, value in {"stream": stream, "return_input_ids": not stream, "return_metrics": True}.items():
        request.parameters[flag].bool_param = value
    if isinstance(prompt, str):
        add_strings(request, "text_input", [prompt])
    elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise Refused(f"prompt is {type(prompt).__name__}; pass text (str) or a list of token ids")
    else:
        add_ints(request, "input_ids", prompt)
    for name, value in params.model_dump(exclude_unset=True, by_alias=True).items():
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
            case int() if value >= 2**63:  # a seed
                request.inputs.add(name=name, datatype="UINT64", shape=[1])
                request.raw_input_contents.append(struct.pack("<Q", value))
            case int():
                request.parameters[name].int64_param = value
            case float():
                request.parameters[name].double_param = value
    return request


def add_strings(request: Any, name: str, texts: Sequence[str]) -> None:
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise Refused(
            f"{name} is not valid Unicode at character {error.start} (a lone surrogate); remove it"
        ) from None
    request.inputs.add(name=name, datatype="BYTES", shape=[len(encoded)])
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))


def add_ints(request: Any, name: str, values: Sequence[int]) -> None:
    try:
        content = struct.pack(f"<{len(values)}i", *values)
    except struct.error as error:
        raise Refused(f"{name} cannot be sent ({error}); pass token ids of the vocabulary") from None
    request.inputs.add(name=name, datatype="INT32", shape=[len(values)])
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
    return Piece(
        text=message["text_output"],
        token_ids=message["output_ids"],
        logprobs=None if logprobs is None else [read_logprob(**entry) for entry in json.loads(logprobs)],
        finish_reason=message.get("finish_reason"),
        metrics=None if metrics is None else Metrics(**json.loads(metrics)),
    )


def read_logprob(token_id: int, logprob: float, top: list[list[Any]]) -> Logprob:
    return Logprob(token_id, logprob, tuple((best, value) for best, value in top))
