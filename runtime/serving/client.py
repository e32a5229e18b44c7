"""The LLM's calls over Triton gRPC, with the same types; `aclient.py` has them for asyncio."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from hemiola.runtime.api import Output, Piece, Prompt, SamplingParams, pairs
from hemiola.runtime.errors import Busy, Lost, Refused
from hemiola.runtime.serving.error_text import error_from
from hemiola.runtime.serving.packing import (
    CANCEL,
    CANCEL_TIMEOUT_S,
    MAX_IN_FLIGHT,
    READY_TIMEOUT_S,
    Chat,
    Message,
    cancellation,
    channel_options,
    pack,
    pb2,
    read_output,
    read_piece,
    unpack,
)

import grpc  # isort: skip  # after packing, which says how to install it
from tritonclient.grpc import service_pb2_grpc  # isort: skip

RETRY_S = 0.5  # before the first retry after a lost connection; then twice as long each time


class Client:
    """A model on a running `hemiola serve`. One connection; every request is a gRPC stream of its own.

    A request of which nothing was given out yet is sent again up to `retries` times if the server is busy, or
    the connection was lost: nothing has happened, or nobody has seen it.
    """

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "hemiola", *, retries: int = 2) -> None:
        self.url = url
        self.model = model
        self.retries = retries
        self._channel = grpc.insecure_channel(url, options=channel_options(url))
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
        except grpc.RpcError as error:
            said = f"no server answers at {self.url} ({error.details()})"
            way_out = "start `hemiola serve`, or pass the gRPC address that it printed"
            raise Refused("not_found", "url", said=said, way_out=way_out) from None
        said = f"the server at {self.url} has no model {self.model!r} that is ready{self._others()}"
        raise Refused("not_found", "model", said=said, way_out="pass one of its models")

    def _others(self) -> str:
        try:
            index = self._stub.RepositoryIndex(pb2.RepositoryIndexRequest(), timeout=READY_TIMEOUT_S)
        except grpc.RpcError:  # a server with a control key keeps it to itself
            return ""
        return f" (it has {', '.join(model.name for model in index.models) or 'none'})"

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Output]:
        """All outputs, in the order of the prompts. One that fails raises; the others are cancelled."""
        requests = [
            pack(self.model, *pair, stream=False, timeout_s=timeout_s) for pair in pairs(prompts, params)
        ]
        outputs: list[Output] = []
        calls: deque[Exchange] = deque()
        try:
            for request in requests:
                if len(calls) == MAX_IN_FLIGHT:
                    outputs.append(_output(calls[0]))
                    calls.popleft()
                calls.append(self._call(request))
            outputs += map(_output, calls)
        finally:
            end(calls)
        return outputs

    def stream(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> "Pieces":
        """Pieces as they come. The request starts now; a caller that stops reading cancels it."""
        params = params or SamplingParams()
        request = pack(self.model, prompt, params, stream=True, timeout_s=timeout_s, request_id=request_id)
        return Pieces(self._call(request))

    def chat(
        self, messages: Chat, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Output:
        """The answer to a conversation, by the checkpoint's chat template; `stream` takes messages, too."""
        request = pack(self.model, messages, params or SamplingParams(), stream=False, timeout_s=timeout_s)
        call = self._call(request)
        try:
            return _output(call)
        finally:
            end([call])

    def cancel(self, request_id: str) -> None:
        """End a request, whoever sent it; one that has ended is left alone."""
        call = self._call(cancellation(self.model, request_id))
        call.finish()
        call.drain()

    def _call(self, request: Any) -> "Exchange":
        call = Exchange(self._stub, self.url, request, self.retries)
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

    def __init__(self, stub: Any, url: str, request: Any, retries: int) -> None:
        self._stub = stub
        self._url = url
        self._request = request
        self._retries = retries
        self._lock = threading.Lock()  # `read` may be called by the reader and by `Client.close`
        self._cancelled = threading.Event()
        self._open()

    def _open(self) -> None:
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # None ends our half of the stream
        self._outgoing.put(self._request)
        self._incoming = self._stub.ModelStreamInfer(iter(self._outgoing.get, None))
        self.ended = False

    def messages(self) -> Iterator[Message]:
        """The responses. The last is given out when the stream has ended."""
        given, tried = False, 0
        while True:
            try:
                for message in self._attempt():
                    given = True
                    yield message
                return
            except (Busy, Lost) as error:
                if given or tried == self._retries or self._cancelled.is_set():
                    raise
                tried += 1
                seconds = error.retry_after_s if isinstance(error, Busy) else RETRY_S * 2 ** (tried - 1)
                if self._cancelled.wait(seconds):
                    raise
            with self._lock:
                self._open()

    def _attempt(self) -> Iterator[Message]:
        last: Message | None = None
        failure = ""
        while (response := self.read()) is not None:
            if response.infer_response.id == CANCEL:
                continue
            message = unpack(response.infer_response)
            failure = failure or response.error_message
            if failure or "finish_reason" in message:
                last = message
                self.finish()
            else:
                yield message
        if failure:
            raise error_from(failure)
        if last is None:
            raise Lost(f"the server at {self._url} ended the stream before the request was finished")
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
                raise Lost(f"the server at {self._url}: {error.code().name}: {error.details()}") from None
            finally:
                if self.ended:
                    self._outgoing.put(None)

    def finish(self) -> None:
        """We send no more."""
        self._outgoing.put(None)

    def cancel(self) -> None:
        """Ask the server to end the request; the stream then ends soon."""
        self._cancelled.set()
        self._outgoing.put(cancellation(self._request.model_name, self._request.id))
        self.finish()

    def drain(self) -> None:
        """Read to the end; a server that does not answer is left alone."""
        give_up = threading.Timer(CANCEL_TIMEOUT_S, self._incoming.cancel)
        give_up.start()
        try:
            while self.read() is not None:
                pass
        except Lost:
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


def _output(call: Exchange) -> Output:
    (message,) = call.messages()
    return read_output(read_piece(message), message["input_ids"])
