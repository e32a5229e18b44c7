"""Requests to tritonserver over one gRPC channel of asyncio's."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2_grpc

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.errors import Lost
from hemiola.runtime.serving import arrival
from hemiola.runtime.serving.error_text import error_from
from hemiola.runtime.serving.packing import (
    CANCEL,
    CANCEL_TIMEOUT_S,
    cancellation,
    pack,
    pb2,
    read_piece,
    unpack,
)

log = logging.getLogger("hemiola.openai")
READY_TIMEOUT_S = 2.0
EOF: Any = getattr(aio, "EOF")  # noqa: B009  # missing in its types
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Said(NamedTuple):
    """What an exchange has to tell: a piece, or why there are no more."""

    number: int  # of the exchange
    piece: Piece | None
    error: Exception | None = None
    input_ids: list[int] | None = None  # the prompt's, if they were asked for


Found = list[tuple[int, Piece]]  # pieces, each with the number of its exchange
Tell = Callable[[Said], Awaitable[None]]
Listener = Callable[[Found], Awaitable[None]]


class Wire:
    """A running tritonserver; `options` are its channel's. To be made, used and closed in one event loop."""

    def __init__(
        self,
        url: str,
        options: Sequence[tuple[str, int]],
        door_key: str = "",
        reason: Callable[[], str] = str,  # why the server ends, once it does
    ) -> None:
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

    def ask(self, requests: Sequence[Any]) -> "Answers":
        """Starts each of these."""
        answers = Answers(len(requests))
        answers.exchanges = [self.begin(request, i, answers.tell) for i, request in enumerate(requests)]
        self._answers.add(answers)
        return answers

    def end(self, reason: str) -> None:
        """Answers under way end with an error that says why."""
        for answers in list(self._answers):
            answers.fail(Lost(reason))

    def begin(self, request: Any, number: int, tell: Tell) -> "AsyncExchange":
        """Starts one request, which reads on by itself when nobody listens any more."""
        exchange = AsyncExchange(self.stub, request, number, tell, self._reason)
        self._exchanges.add(exchange)
        exchange.task.add_done_callback(lambda _: self._exchanges.discard(exchange))
        return exchange

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancels what is in flight and ends the connection; a server that does not answer has that time."""
        for exchange in list(self._exchanges):
            exchange.cancel()
        if self._exchanges:
            await asyncio.wait([exchange.task for exchange in self._exchanges], timeout=timeout_s)
        await self._channel.close()


class AsyncExchange:
    """One request on a gRPC stream of its own, which is always read to its end; client.Exchange says why.

    Its task tells each response in the moment in which it came, and reads on when those who listen have left
    by `cancel`.
    """

    def __init__(self, stub: Any, request: Any, index: int, tell: Tell, reason: Callable[[], str]) -> None:
        self._stub = stub
        self._reason = reason
        self._request = request
        self._index = index
        self._tell_it = tell
        self._call = stub.ModelStreamInfer()
        self._writing = asyncio.Lock()
        self._closed = False  # our half of the stream
        self._leaving: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Asks the server to end the request; the stream then ends soon."""
        if not self._closed and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def _run(self) -> None:
        try:
            await self._read()
        except aio.AioRpcError as error:
            text = f"the server: {error.code().name}: {error.details()}"
            gone = error.code() in GONE
            await self._tell(error=Lost(self._reason() or text) if gone else RuntimeError(text))
        except asyncio.CancelledError:
            await self._tell(error=Lost(self._reason() or "the server does not answer"))
        except Exception as error:
            log.exception("request %s", self._request.id)
            await self._tell(error=error)
        finally:
            self._closed = True

    async def _read(self) -> None:
        await self._send(self._request)
        ended = False
        while (response := await self._call.read()) is not EOF:
            if response.infer_response.id == CANCEL:
                continue
            message = unpack(response.infer_response)
            if response.error_message:
                await self._tell(error=error_from(response.error_message))
            else:
                await self._tell(read_piece(message), input_ids=message.get("input_ids"))
            if response.error_message or "finish_reason" in message:
                ended = True
                await self._send(last=True)
        if not ended:
            text = "the server ended the stream before the request was finished"
            await self._tell(error=Lost(self._reason() or text))

    async def _send(self, request: Any = None, last: bool = False) -> None:
        async with self._writing:
            if self._closed:
                return
            self._closed = last
            if request is not None:
                await self._call.write(request)
            if last:
                await self._call.done_writing()

    async def _leave(self) -> None:
        """A dropped stream can lock tritonserver 2.51 up, so the request is cancelled by a second one."""
        request = cancellation(self._request.model_name, self._request.id)
        asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, self.task.cancel)
        try:
            await self._send(request, last=True)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the server is gone, which the reader tells

    async def _tell(
        self,
        piece: Piece | None = None,
        error: Exception | None = None,
        input_ids: list[int] | None = None,
    ) -> None:
        await self._tell_it(Said(self._index, piece, error, input_ids))


class Answers:
    """What the exchanges of one request say, as it comes. Leaving early cancels those that still run."""

    def __init__(self, num_open: int) -> None:
        self.exchanges: list[AsyncExchange] = []
        self._num_open = num_open
        self._early: Found = []  # from before anybody listened
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

    async def tell(self, said: Said) -> None:
        """What an exchange says."""
        if self._over.is_set():
            return  # nobody listens any more
        if said.error is not None:
            self._end(said.error)
        elif said.piece is not None and self._listener is None:
            self._early.append((said.number, said.piece))
            self._begun.set()
        elif said.piece is not None:
            try:
                await self._hear([(said.number, said.piece)])
            except Exception as error:  # the listener's: the exchange itself goes on
                self._end(error)

    async def _hear(self, found: Found) -> None:
        assert self._listener is not None
        await self._listener(found)
        self._num_open -= sum(piece.finish_reason is not None for _, piece in found)
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
            if not exchange.task.done():
                exchange.cancel()
