"""Requests to tritonserver over one gRPC channel of asyncio's."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from grpc import aio
from tritonclient.grpc import service_pb2_grpc

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.errors import Lost
from hemiola.runtime.serving import arrival
from hemiola.runtime.serving.exchange import Exchange, Received
from hemiola.runtime.serving.packing import CANCEL_TIMEOUT_S, Message, pack, pb2, read_piece

READY_TIMEOUT_S = 2.0
EOF: Any = getattr(aio, "EOF")  # noqa: B009  # missing in its types

Pieces = list[tuple[int, Piece]]  # pieces, each with the number of its exchange
Take = Callable[[int, Received], Awaitable[None]]  # the number of the exchange, and what came of it
Listener = Callable[[Pieces], Awaitable[None]]


class Wire:
    """A running tritonserver; `options` are its channel's. To be made, used and closed in one event loop."""

    def __init__(
        self,
        url: str,
        options: Sequence[tuple[str, int]],
        door_key: str = "",
        reason: Callable[[], str] = str,  # why the server ends, once it does
        server: str = "the server",  # in messages
    ) -> None:
        self._server = server
        self._door_key = door_key
        self._reason = reason
        self._channel = aio.insecure_channel(url, options=options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._exchanges: set[AsyncExchange] = set()  # asyncio keeps no task alive by itself
        self._answers: WeakSet[Answers] = WeakSet()

    async def is_ready(self, models: Mapping[str, object]) -> bool:
        try:
            asked = [
                self.stub.ModelReady(pb2.ModelReadyRequest(name=model), timeout=READY_TIMEOUT_S)
                for model in models
            ]
            return all(answer.ready for answer in await asyncio.gather(*asked))
        except aio.AioRpcError:
            return False

    def pack(
        self, model: str, asked: list[tuple[list[int], SamplingParams]], begun: float = 0.0
    ) -> list[Any]:
        """A request for each of these. begun: when they came, by time.perf_counter."""
        requests = [pack(model, ids, params, stream=True) for ids, params in asked]
        for request in requests if self._door_key else ():
            request.parameters[arrival.NAME].string_param = arrival.make_mark(self._door_key, begun)
        return requests

    def ask(self, requests: list[Any]) -> "Answers":
        """Starts each of these, which are taken out: an answer may take minutes, and need not hold them."""
        answers = Answers(len(requests))
        taken = (requests.pop(0) for _ in range(len(requests)))
        answers.exchanges = [self.begin(request, i, answers.take) for i, request in enumerate(taken)]
        self._answers.add(answers)
        return answers

    def end(self, reason: str) -> None:
        """Answers under way end with an error that says why."""
        for answers in list(self._answers):
            answers.fail(Lost(reason))

    def begin(self, request: Any, number: int, take: Take) -> "AsyncExchange":
        """Starts one request, which reads on by itself when nobody listens any more."""
        stream = AsyncStream(self.stub.ModelStreamInfer())
        exchange = Exchange(stream, request, partial(take, number), self._server, self._reason)
        running = AsyncExchange(exchange)
        self._exchanges.add(running)
        running.task.add_done_callback(lambda _: self._exchanges.discard(running))
        return running

    def open(self, request: Any) -> "Queued":
        """The same, with a queue of what comes of it."""
        queued = Queued()
        queued.exchange = self.begin(request, 0, queued.take)
        return queued

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancels what is in flight and ends the connection; a server that does not answer has that time."""
        for exchange in list(self._exchanges):
            exchange.cancel()
        if self._exchanges:
            await asyncio.wait([exchange.task for exchange in self._exchanges], timeout=timeout_s)
        await self._channel.close()


class AsyncStream:
    """A gRPC stream of asyncio's. Its requests are written one after the other, whoever sends them."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._writing = asyncio.Lock()
        self._closed = False  # our half of it

    async def send(self, request: Any = None, *, last: bool = False) -> None:
        async with self._writing:
            if self._closed:
                return
            self._closed = last
            if request is not None:
                await self._call.write(request)
            if last:
                await self._call.done_writing()

    async def read(self) -> Any:
        response = await self._call.read()
        return None if response is EOF else response

    async def piece(self, message: Message) -> Piece:
        is_long = "prompt_logprobs" in message
        return await asyncio.to_thread(read_piece, message) if is_long else read_piece(message)


class AsyncExchange:
    """An exchange in a task of its own, which reads on when those who listen have left by `cancel`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._leaving: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(exchange.run())

    def cancel(self) -> None:
        """Asks the server to end the request; the stream then ends soon."""
        if not (self._exchange.ended or self.task.done()) and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, self.task.cancel)
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # gone, which the reader tells
            await self._exchange.cancel()


class Queued:
    """An exchange of which one coroutine reads the replies."""

    exchange: AsyncExchange

    def __init__(self) -> None:
        self._replies: asyncio.Queue[Received] = asyncio.Queue()

    async def take(self, _: int, reply: Received) -> None:
        self._replies.put_nowait(reply)

    async def read(self) -> Received:
        return await self._replies.get()


class Answers:
    """What the exchanges of one request say, as it comes. Leaving early cancels those that still run."""

    def __init__(self, num_open: int) -> None:
        self.exchanges: list[AsyncExchange] = []
        self._num_open = num_open
        self._early: Pieces = []  # from before anybody listened
        self._listener: Listener | None = None
        self._error: Exception | None = None
        self._begun, self._over = asyncio.Event(), asyncio.Event()

    async def begin(self) -> None:
        """Wait for the first piece. If an error comes instead, it raises."""
        await self._begun.wait()
        if self._error is not None and not self._early:
            raise self._error

    async def each(self, listener: Listener) -> None:
        """Hand every piece over, within the task that read it; return behind the last. An error raises."""
        self._listener, early = listener, self._early
        if early:
            await self._hear(early)
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def take(self, number: int, reply: Received) -> None:
        """What came of an exchange."""
        if self._over.is_set():
            return  # nobody listens any more
        if reply.error is not None:
            self._end(reply.error)
        elif reply.piece is not None and self._listener is None:
            self._early.append((number, reply.piece))
            self._begun.set()
        elif reply.piece is not None:
            try:
                await self._hear([(number, reply.piece)])
            except Exception as error:  # the listener's: the exchange itself goes on
                self._end(error)

    async def _hear(self, pieces: Pieces) -> None:
        assert self._listener is not None
        await self._listener(pieces)
        self._num_open -= sum(piece.finish_reason is not None for _, piece in pieces)
        if not self._num_open:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._over.set()
        self._begun.set()

    def fail(self, error: Exception) -> None:
        if not self._over.is_set():
            self._end(error)

    def close(self) -> None:
        self._over.set()
        for exchange in self.exchanges:
            exchange.cancel()
