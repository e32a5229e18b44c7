"""The LLM's calls over Triton gRPC, with the same types; `aclient.py` has them for asyncio."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from hemiola.runtime.api import Output, Piece, Prompt, SamplingParams, pairs
from hemiola.runtime.errors import Lost
from hemiola.runtime.serving.exchange import (
    CLOSED,
    Answer,
    Exchange,
    Received,
    check_cancelled,
    check_model,
    read_output,
    text_of,
)
from hemiola.runtime.serving.packing import (
    CANCEL_TIMEOUT_S,
    MAX_IN_FLIGHT,
    Chat,
    Message,
    cancellation,
    channel_options,
    check_client,
    pack,
    read_piece,
)

import grpc  # isort: skip  # after packing, which says how to install it
from tritonclient.grpc import service_pb2_grpc  # isort: skip


class Client:
    """A model on a running `hemiola serve`. One connection; every request is a gRPC stream of its own.

    A request of which nothing was given out yet is sent again up to `retries` times if the server is busy, or
    the connection was lost: nothing has happened, or nobody has seen it.
    """

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "hemiola", *, retries: int = 2) -> None:
        check_client(url, model, retries)
        self.url = url
        self.model = model
        self.retries = retries
        self._connections: dict[int, Connection] = {}  # by process
        self._end = weakref.finalize(self, close, self._connections)  # at exit, too
        try:
            _run(check_model, self._ask, url, model)
        except BaseException:
            self.close()
            raise

    @property
    def _here(self) -> "Connection":
        """This process's. grpc may hold that a thread, which a fork has not, still reads for the old one."""
        pid = os.getpid()
        if pid not in self._connections:
            if not self._end.alive:
                raise Lost(CLOSED)
            self._connections.setdefault(pid, Connection(self.url))
        return self._connections[pid]

    async def _ask(self, method: str, request: Any, timeout: float) -> Any:
        return getattr(self._here.stub, method)(request, timeout=timeout)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Output]:
        """All outputs, in the order of the prompts. One that fails raises; the others are cancelled."""
        return self._outputs(
            [pack(self.model, *pair, stream=False, timeout_s=timeout_s) for pair in pairs(prompts, params)]
        )

    def _outputs(self, requests: list[Any]) -> list[Output]:
        outputs: list[Output] = []
        waiting: deque[PendingRequest] = deque()
        try:
            for request in requests:
                if len(waiting) == MAX_IN_FLIGHT:
                    outputs.append(read_output(waiting[0].read()))
                    waiting.popleft()
                waiting.append(PendingRequest(self, request))
                waiting[-1].start()
            outputs += [read_output(request.read()) for request in waiting]
        finally:
            end(waiting)
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
        params = SamplingParams() if params is None else params
        request = pack(self.model, prompt, params, stream=True, timeout_s=timeout_s, request_id=request_id)
        pieces = Pieces(PendingRequest(self, request))
        try:
            pieces.start()
        except BaseException:  # Ctrl-C too
            pieces.close()
            raise
        return pieces

    def chat(
        self, messages: Chat, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Output:
        """The answer to a conversation, by the checkpoint's chat template; `stream` takes messages, too."""
        params = SamplingParams() if params is None else params
        return self._outputs([pack(self.model, messages, params, stream=False, timeout_s=timeout_s)])[0]

    def cancel(self, request_id: str) -> None:
        """End a request, whoever sent it; one that has ended is left alone."""
        requests, server = iter([cancellation(self.model, request_id)]), f"the server at {self.url}"
        try:
            answers = self._here.stub.ModelStreamInfer(requests, timeout=CANCEL_TIMEOUT_S)
        except ValueError:  # grpc's
            raise Lost(CLOSED) from None
        try:
            for response in answers:
                check_cancelled(response, server)
        except grpc.RpcError as error:
            raise Lost(text_of(error, server)) from None

    def close(self) -> None:
        """Cancels what is in flight and ends the connection."""
        self._end()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connection:
    """One process's to the server."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url, options=channel_options(url))
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.requests: weakref.WeakSet[PendingRequest] = weakref.WeakSet()


class PendingRequest:
    """A request under way. One thread starts it and reads what comes of it; any other may end it.

    Whoever makes one ends it, too: Ctrl-C may come at any line of `start`, when it is half sent.
    """

    def __init__(self, client: Client, request: Any) -> None:
        self._client = client  # which is not closed before
        self._request = request
        self._ended = threading.Event()
        self._read = False  # to its last reply
        self._pid = os.getpid()
        self._threaded: Threaded | None = None
        client._here.requests.add(self)

    def start(self) -> None:
        self._answer = Answer(self._send, self._client.retries, self._pause)

    def _send(self) -> "Threaded":
        """What is ended is not sent again: either this sees it, or `cancel` sees what this sends.

        No lock, since Ctrl-C can leave one taken.
        """
        self._threaded = Threaded(self._client._here.stub, self._request, f"the server at {self._client.url}")
        if self._ended.is_set() or not self._client._end.alive:
            self._ended.set()  # nobody waits for a thread that never starts
            raise Lost(CLOSED)
        self._threaded.start()
        return self._threaded

    async def _pause(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def read(self) -> Received:
        if os.getpid() != self._pid:
            raise Lost(f"process {self._pid} sent this request, and this is a fork of it")
        try:
            reply = _run(self._answer.read)
            if reply.is_last:
                self._read = True
                self.join(CANCEL_TIMEOUT_S)
            return reply
        except BaseException:  # Ctrl-C too
            end([self])
            raise

    def cancel(self) -> None:
        self._ended.set()
        if self._threaded is not None:
            self._threaded.cancel()

    def join(self, timeout_s: float) -> None:
        """Until the stream has ended; a server that does not answer is left alone."""
        if self._threaded is not None:
            self._threaded.join(timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether this process can end it, and has not."""
        over = self._ended.is_set() or (self._read and (self._threaded is None or self._threaded.is_over))
        return os.getpid() == self._pid and not over


class Threaded:
    """An exchange in a thread of its own, which reads on when nobody listens any more."""

    def __init__(self, stub: Any, request: Any, server: str) -> None:
        self._stream = ThreadStream(stub)
        self._exchange = Exchange(self._stream, request, self._take, server)
        self._replies: SimpleQueue[Received] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._over = threading.Event()  # the thread's own word, since `Thread.start` may be interrupted

    def start(self) -> None:
        """After Ctrl-C in here, it may have been sent or not; `cancel` holds either way."""
        self._thread.start()

    def _work(self) -> None:
        try:
            _run(self._exchange.run)
        finally:
            self._over.set()

    async def _take(self, reply: Received) -> None:
        self._replies.put(reply)

    async def read(self) -> Received:
        return self._replies.get()

    def cancel(self) -> None:
        """Asks the server to end the request; the stream then ends soon."""
        _run(self._exchange.cancel)

    def join(self, timeout_s: float) -> None:
        if self._thread is threading.current_thread():  # of Pieces.__del__, which may come anywhere
            return
        if not self._over.wait(max(0.0, timeout_s)):
            self._stream.drop()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()


class ThreadStream:
    """A gRPC stream whose reads block their thread. Its coroutines await nothing.

    The reading thread opens it. Ctrl-C interrupts the main thread only, and inside gRPC's own lines it can
    leave a call behind for which closing the channel waits for ever.
    """

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # None ends our half of the stream
        self._incoming: Any = None
        self._is_dropped = False

    async def send(self, request: Any = None, *, last: bool = False) -> None:
        if request is not None:
            self._outgoing.put(request)
        if last:
            self._outgoing.put(None)

    async def read(self) -> Any:
        response = None
        try:
            if self._incoming is None:
                self._incoming = self._stub.ModelStreamInfer(iter(self._outgoing.get, None))
                if self._is_dropped:
                    self._incoming.cancel()
            response = next(self._incoming, None)
            return response
        finally:
            if response is None:
                self._outgoing.put(None)

    async def piece(self, message: Message) -> Piece:
        return read_piece(message)

    def drop(self) -> None:
        """From another thread."""
        self._is_dropped = True
        if self._incoming is not None:
            self._incoming.cancel()


def _run(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """What a coroutine returns that awaits no event loop. Made here: Ctrl-C comes before it is, or within."""
    try:
        function(*arguments).send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it awaits an event loop")


def end(requests: Iterable[PendingRequest]) -> None:
    """Cancel those that are still running, and read them to their ends."""
    running = [request for request in requests if request.is_open]
    for request in running:
        request.cancel()
    limit = time.monotonic() + CANCEL_TIMEOUT_S
    for request in running:
        request.join(limit - time.monotonic())


def close(connections: Mapping[int, Connection]) -> None:
    """What is left of a client here. A fork leaves the connection of its parent alone."""
    here = connections.get(os.getpid())
    if here is not None:
        end(list(here.requests))
        here.channel.close()


class Pieces(Iterator[Piece]):
    """A request's pieces. Leaving a loop over them early cancels the request."""

    def __init__(self, request: PendingRequest) -> None:
        self._request = request
        self._over = False

    def start(self) -> None:
        self._request.start()

    def __next__(self) -> Piece:
        if self._over:
            raise StopIteration
        self._over = True  # unless it is followed by another
        reply = self._request.read()
        self._over = reply.is_last
        assert reply.piece is not None
        return reply.piece

    def close(self) -> None:
        self._over = True
        end([self._request])

    def __del__(self) -> None:
        if hasattr(self, "_request"):  # else Ctrl-C came before it had one
            end([self._request])
