"""One request to tritonserver: what is sent, what comes back, how it ends early, when it is sent again.

Every client uses this: those of asyncio await its coroutines, `Client` runs them in threads, where their
streams block and nothing awaits an event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from hemiola.runtime.api import Output, Piece
from hemiola.runtime.errors import Busy, Lost, Refused
from hemiola.runtime.serving.error_text import error_from
from hemiola.runtime.serving.packing import CANCEL, READY_TIMEOUT_S, Message, cancellation, pb2, unpack

import grpc  # isort: skip  # after packing, which says how to install it

log = logging.getLogger("hemiola.client")
CLOSED = "the client was closed"
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
RETRY_S = 0.5  # before the first retry after a lost connection; then twice as long each time


class Received(NamedTuple):
    """What came of a request: a piece, or why there are no more."""

    piece: Piece | None
    error: Exception | None = None
    input_ids: list[int] | None = None  # the prompt's, if they were asked for

    @property
    def is_last(self) -> bool:
        return self.piece is None or self.piece.finish_reason is not None


def read_output(reply: Received) -> Output:
    """Of a request that is answered by one response."""
    piece = reply.piece
    assert piece is not None and piece.finish_reason is not None and piece.metrics is not None
    assert reply.input_ids is not None
    return Output(
        prompt_token_ids=reply.input_ids,
        token_ids=piece.token_ids,
        text=piece.text,
        finish_reason=piece.finish_reason,
        logprobs=piece.logprobs,
        metrics=piece.metrics,
        prompt_logprobs=piece.prompt_logprobs,
    )


class ServerStream(Protocol):
    """A gRPC stream to the server and back."""

    async def send(self, request: Any = None, *, last: bool = False) -> None:
        """After the last request nothing more is sent."""
        ...

    async def read(self) -> Any:
        """The next response; None at the stream's end. Raises grpc.RpcError."""
        ...

    async def piece(self, message: Message) -> Piece:
        """What a response says. An event loop serves others meanwhile, if it is long."""
        ...


def text_of(error: grpc.RpcError, server: str) -> str:
    return f"{server}: {error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]


def check_cancelled(response: Any, server: str) -> None:
    """Of a cancellation alone: a server that cannot do it says so."""
    if response.error_message:
        raise error_from(response.error_message, lambda text: Lost(f"{server}: {text}"))


class Exchange:
    """One request on a gRPC stream of its own, which is always read to its end.

    tritonserver 2.51 can lock up when a gRPC stream is dropped while it writes to it, and keeps a request
    alive for ever when that write is the last. So a request is cancelled by a second one on the same stream.
    """

    def __init__(
        self,
        stream: ServerStream,
        request: Any,
        take: Callable[[Received], Awaitable[None]],
        server: str = "the server",  # in messages
        reason: Callable[[], str] = str,  # why the server ends, once it does
    ) -> None:
        self._stream, self._take = stream, take
        self._request: Any = request  # until it is sent: an answer may take minutes, and need not hold it
        self._model, self._id = request.model_name, request.id
        self._server, self._reason = server, reason
        self.ended = False  # the last reply has come

    async def run(self) -> None:
        """Hand every reply over as it comes, until the stream has ended."""
        try:
            await self._read()
        except grpc.RpcError as error:
            gone, text = error.code() in GONE, text_of(error, self._server)  # pyright: ignore[reportAttributeAccessIssue]
            await self._fail(self._lost(text) if gone else RuntimeError(text))
        except asyncio.CancelledError:
            await self._fail(self._lost(f"{self._server} does not answer"))
        except Exception as error:
            log.exception("request %s", self._id)
            await self._fail(error)

    async def _read(self) -> None:
        request, self._request = self._request, None
        await self._stream.send(request)
        del request
        while (response := await self._stream.read()) is not None:
            if response.infer_response.id == CANCEL:
                continue
            message = unpack(response.infer_response)
            if response.error_message:
                await self._fail(error_from(response.error_message, self._lost_by))
            else:
                piece = await self._stream.piece(message)
                await self._take(Received(piece, input_ids=message.get("input_ids")))
            if response.error_message or "finish_reason" in message:
                self.ended = True
                await self._stream.send(last=True)
        if not self.ended:
            await self._fail(self._lost(f"{self._server} ended the stream before the request was finished"))

    def _lost(self, text: str) -> Lost:
        return Lost(self._reason() or text)

    def _lost_by(self, text: str) -> Lost:
        """tritonserver's own word; without the server's name nobody would know whose it is."""
        return self._lost(f"{self._server}: {text}")

    async def _fail(self, error: Exception) -> None:
        await self._take(Received(None, error))

    async def cancel(self) -> None:
        """Ask the server to end the request; the stream then ends soon."""
        await self._stream.send(cancellation(self._model, self._id), last=True)


class Source(Protocol):
    """An exchange under way; what comes of it waits to be read."""

    async def read(self) -> Received: ...


class Answer:
    """The replies to one request, which is sent again while nothing of it was given out.

    The server was busy, or the connection was lost: nothing has happened, or nobody has seen it.
    """

    def __init__(
        self,
        begin: Callable[[], Source],
        retries: int,
        pause: Callable[[float], Awaitable[object]],  # true: somebody has ended the request meanwhile
    ) -> None:
        self._begin, self._retries, self._pause = begin, retries, pause
        self._source = begin()
        self._tried = 0

    async def read(self) -> Received:
        """The next reply; an error raises."""
        while True:
            reply = await self._source.read()
            if reply.error is None:
                self._tried = self._retries  # something was given out
                return reply
            if not isinstance(reply.error, (Busy, Lost)) or self._tried == self._retries:
                raise reply.error
            busy = reply.error.retry_after_s if isinstance(reply.error, Busy) else None
            if await self._pause(RETRY_S * 2**self._tried if busy is None else busy):
                raise reply.error
            self._tried += 1
            self._source = self._begin()


async def check_model(ask: Callable[..., Awaitable[Any]], url: str, model: str) -> None:
    """Refuses a server, or a model, that is not there. ask: a method of the server, by its name."""
    try:
        asked = pb2.ModelReadyRequest(name=model)
        if (await ask("ModelReady", asked, timeout=READY_TIMEOUT_S)).ready:
            return
    except grpc.RpcError as error:
        message = f"no server answers at {url} ({error.details()})"  # pyright: ignore[reportAttributeAccessIssue]
        way_out = "start `hemiola serve`, or pass the gRPC address that it printed"
        raise Refused("not_found", "url", message=message, way_out=way_out) from None
    try:
        index = await ask("RepositoryIndex", pb2.RepositoryIndexRequest(), timeout=READY_TIMEOUT_S)
        others = f" (it has {', '.join(one.name for one in index.models) or 'none'})"
    except grpc.RpcError:  # a server with a control key does not list its models
        others = ""
    message = f"the server at {url} has no model {model!r} that is ready{others}"
    raise Refused("not_found", "model", message=message, way_out="pass one of its models")
