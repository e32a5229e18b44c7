"""The routes: a body becomes requests to tritonserver, their pieces an answer or a stream of events."""

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from hemiola import __version__
from hemiola.runtime.errors import Busy
from hemiola.runtime.serving import ending
from hemiola.runtime.serving.aside import Aside
from hemiola.runtime.serving.json_size import is_dear
from hemiola.runtime.serving.openai.body import Bodies
from hemiola.runtime.serving.openai.errors import ApiError, api_error, named
from hemiola.runtime.serving.openai.events import stream, too_many
from hemiola.runtime.serving.openai.model import ServedModel, find_model
from hemiola.runtime.serving.openai.page import engines_page
from hemiola.runtime.serving.openai.readers import LARGE, Readers
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from hemiola.runtime.serving.openai.tokenizing import (
    AskedText,
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    read_text,
    tokenize,
)
from hemiola.runtime.serving.openai.work import Work, chat, completion, prepare, response
from hemiola.runtime.serving.slow_reader import writing
from hemiola.runtime.serving.wire import Wire

log = logging.getLogger("hemiola.openai")
METRICS_TIMEOUT_S = 5.0
OPEN = {"/health", "/metrics", "/version"}  # need no key
AnyRequest = TypeVar("AnyRequest", bound=ApiRequest)
Made = TypeVar("Made")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class FrontLimits:
    """What the front takes."""

    max_requests: int = 1024  # under way at once; each choice of each prompt is one
    max_body: int = 16 * 2**20  # bytes
    api_keys: tuple[str, ...] = ()  # none: everybody


class App:
    """The front's handlers. To be made and used within one event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        wire: Wire,
        metrics_url: str,
        limits: FrontLimits,
        refuses: Callable[[], bool] = lambda: False,  # the server has begun to end
    ) -> None:
        self._models = models
        self._wire = wire
        self._metrics_url = metrics_url
        self._limits = limits
        self._bodies = Bodies(limits.max_body)
        self._readers = Readers()
        self._aside = Aside({name: part for model in models.values() for name, part in model.parts.items()})
        self._refuses = refuses
        self._reading: set[asyncio.Task[Any]] = set()  # whose requests are not on their way yet
        self._end_reason = ""
        self._num_open = 0  # requests to the engine
        self._num_handled = 0  # requests of callers

    @property
    def num_answering(self) -> int:
        """Requests whose body is whole, and whose answer is not."""
        return self._num_handled - self._bodies.num_reading

    def end(self, reason: str) -> None:
        """Answers under way end with an error that says why."""
        self._end_reason = reason
        self._wire.end(reason)
        for task in self._reading:
            task.cancel()

    def close(self) -> None:
        self._readers.close()
        self._aside.close()

    def routes(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model}", self._show_model),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._respond),
                web.get("/version", self._version),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys, errors in OpenAI's shape, and one line per request, never with its text."""
        start, status = time.monotonic(), "left"
        self._num_handled += 1
        try:
            self._check_open()
            self._check_key(request)
            response = await handler(request)
            async with writing(request.transport):
                await response.prepare(request)
                await response.write_eof()
            status = str(response.status)
            return response
        except asyncio.CancelledError:
            raise  # nobody is there to be told
        except ConnectionError as error:
            status = f"left ({error})"
            if request.transport is not None:
                request.transport.abort()  # what it has not read yet is held no longer
            raise
        except Exception as error:
            failure = http_error(request, error) if isinstance(error, web.HTTPException) else api_error(error)
            if failure.status == 500:
                log.error("%s %s: %s", request.method, request.rel_url.raw_path, error, exc_info=error)
            status = str(failure.status)
            return self._error_response(failure)
        finally:
            self._num_handled -= 1
            seconds = time.monotonic() - start
            log.debug("%s %s %s %.3f s", request.method, request.rel_url.raw_path, status, seconds)

    def _error_response(self, error: ApiError) -> web.Response:
        accepted = {"Accept-Encoding": "gzip, identity"} if error.status == 415 else {}
        response = web.json_response(error.body(), status=error.status, headers=error.headers | accepted)
        if self._refuses():
            response.force_close()
        return response

    def _check_open(self) -> None:
        if self._refuses():
            raise ApiError(503, ending.REASON, code="server_ends")

    def _check_key(self, request: web.Request) -> None:
        if not self._limits.api_keys or request.path in OPEN:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode(errors="surrogateescape")
        known = [hmac.compare_digest(sent, os.fsencode(key)) for key in self._limits.api_keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    # ---- what stands still

    async def _health(self, _: web.Request) -> web.Response:
        ready = await self._wire.is_ready(self._models)
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        """What tritonserver's page says of the engines."""
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._metrics_url, raise_for_status=True) as page,
            ):
                return web.Response(
                    text=engines_page(await page.text()),
                    headers={"Content-Type": "text/plain; version=0.0.4"},
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"no answer within {METRICS_TIMEOUT_S:g} s"
            raise ApiError(503, f"tritonserver's metrics cannot be read: {why}") from None

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [describe(m) for m in self._models.values()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        return web.json_response(describe(find_model(self._models, request.match_info["model"])))

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _tokenize(self, http: web.Request) -> web.Response:
        return await self._of_text(http, TokenizeRequest, tokenize)

    async def _detokenize(self, http: web.Request) -> web.Response:
        return await self._of_text(http, DetokenizeRequest, detokenize)

    async def _of_text(
        self, http: web.Request, kind: type[AskedText], make: Callable[[ServedModel, AskedText], Any]
    ) -> web.Response:
        async with self._bodies.held(http) as body:
            self._check_open()
            text = await self._made(read_text, body, kind, make, self._models)
        return web.Response(text=text, content_type="application/json")

    async def _made(self, function: Callable[..., Made], body: bytearray, *arguments: object) -> Made:
        """What function(body, *arguments) returns; where it holds up nobody."""
        if is_dear(body):
            return await self._read(LARGE + 1, partial(self._aside.run, function, body, *arguments))
        return await self._read(len(body), partial(function, body, *arguments))

    async def _read(self, size: int, work: Callable[[], Made]) -> Made:
        """By a thread; what has not ended when the server does is answered nevertheless."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            return await self._readers.run(size, work)
        except asyncio.CancelledError:
            if not self._end_reason:
                raise  # its client has left
            raise ApiError(503, self._end_reason, code="server_ends") from None
        finally:
            self._reading.discard(task)

    # ---- what is generated

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, CompletionRequest, completion)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, ChatRequest, chat)

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, ResponsesRequest, response)

    async def _generate(
        self, http: web.Request, kind: type[AnyRequest], make: Callable[[ServedModel, AnyRequest], Work]
    ) -> web.StreamResponse:
        """The body, and all that was read from it, are let go of before the answer begins."""
        begun = time.perf_counter()
        max_requests = self._limits.max_requests
        async with self._bodies.held(http) as body:
            self._check_open()  # a server that has begun to end meanwhile takes it no more
            self._check_room(1)  # before it is read
            options, names, model, work = await self._made(
                prepare, body, kind, make, self._models, max_requests
            )
        del body
        with named(names), self._admit(len(work.asked)):
            pack = partial(self._wire.pack, model, work.asked, begun)
            packed = await self._read(work.num_sent, pack)
            return await self._answer(http, options, work, packed)

    async def _answer(
        self, http: web.Request, options: StreamOptions | None, work: Work, packed: list[Any]
    ) -> web.StreamResponse:
        """options: of a stream of events."""
        answers = self._wire.ask(packed)
        try:
            if options is not None:
                return await stream(http, work, answers, options, self._readers)
            await answers.each(work.take)
            text = await self._readers.run(work.num_tokens, work.reply.text)
            headers = {"X-Request-Id": work.reply.id}
            return web.Response(text=text, content_type="application/json", headers=headers)
        except Busy as error:
            raise too_many(error, len(work.asked)) from None
        finally:
            answers.close()

    @contextlib.contextmanager
    def _admit(self, num_requests: int) -> Iterator[None]:
        self._check_room(num_requests)
        self._num_open += num_requests
        try:
            yield
        finally:
            self._num_open -= num_requests

    def _check_room(self, num_requests: int) -> None:
        max_requests = self._limits.max_requests
        if self._num_open + num_requests > max_requests:
            raise ApiError(
                429, f"requests under way: {self._num_open} of {max_requests}; try again in a moment",
                code="rate_limit_exceeded",
            )  # fmt: skip


def describe(model: ServedModel) -> dict[str, Any]:
    fields = {"owned_by": "hemiola", "max_model_len": model.max_len}
    return {"id": model.name, "object": "model", "created": model.created, **fields}


def http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """What aiohttp says, such as 404 or 413."""
    match error.status:
        case 404:
            return ApiError(404, f"no {request.path} here; docs/openai.md lists the routes", code="not_found")
        case 405:
            return ApiError(405, f"{request.path} does not take {request.method}", code="method_not_allowed")
        case status:
            return ApiError(status, error.text or error.reason)
