"""The routes: a body becomes requests to tritonserver, their pieces an answer or a stream of events."""

import asyncio
import contextlib
import fcntl
import hmac
import logging
import re
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Busy, Refused, counted
from hemiola.runtime.serving.openai.body import Bodies
from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.errors import ApiError, api_error
from hemiola.runtime.serving.openai.guide import guide
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.reply import ENCODER, ChatChoice, Choice, Reply, TextChoice, event
from hemiola.runtime.serving.openai.schema import (
    DEFAULT_MAX_TOKENS,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    parse,
)
from hemiola.runtime.serving.openai.wire import Answers, Found, Wire
from hemiola.runtime.text import LONG_TEXT

log = logging.getLogger("hemiola.openai")
WRITE_TIMEOUT_S = 60.0  # for a client to read anything of what fills its socket
LOOKS = 20  # within that time, at what it has read
NEVER_WAITS = 2**15  # bytes; asyncio holds twice as many back before a writer has to wait
METRICS_TIMEOUT_S = 5.0
ROOM = re.compile(r"in (\d+) rows?, and no more than max_queue=(\d+) may wait")  # model.py's words
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class FrontLimits:
    """What the front takes."""

    max_requests: int = 1024  # under way at once; each choice of each prompt is one
    max_body: int = 16 * 2**20  # bytes
    api_keys: tuple[str, ...] = ()  # none: everybody


class Work(NamedTuple):
    """A body as requests to the engine: one for each choice."""

    asked: list[tuple[list[int], SamplingParams]]
    choices: Sequence[Choice]
    reply: Reply
    begun: float  # when its headers had come in, by time.perf_counter

    async def take(self, found: Found) -> None:
        for index, piece in found:
            self.choices[index].take(piece)


class App:
    """The front's handlers. To be made and used within one event loop."""

    def __init__(
        self, models: Mapping[str, ServedModel], wire: Wire, metrics_url: str, limits: FrontLimits
    ) -> None:
        self._models = models
        self._wire = wire
        self._metrics_url = metrics_url
        self._limits = limits
        self._bodies = Bodies(limits.max_body)
        self._num_open = 0

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
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys, errors in OpenAI's shape, and one line per request, never with its text."""
        start, status = time.monotonic(), "left"
        try:
            self._check_key(request)
            response = await handler(request)
            async with writing(request):
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
            found = http_error(request, error) if isinstance(error, web.HTTPException) else api_error(error)
            if found.status == 500:
                log.error("%s %s: %s", request.method, request.path, error, exc_info=error)
            status = str(found.status)
            return error_response(found)
        finally:
            seconds = time.monotonic() - start
            log.debug("%s %s %s %.3f s", request.method, request.path, status, seconds)

    def _check_key(self, request: web.Request) -> None:
        if not self._limits.api_keys or not request.path.startswith("/v1/"):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode(errors="surrogateescape")
        known = [hmac.compare_digest(sent, key.encode()) for key in self._limits.api_keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    # ---- what stands still

    async def _health(self, _: web.Request) -> web.Response:
        ready = await self._wire.is_ready(self._models)
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        """Triton's page."""
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._metrics_url) as page,
            ):
                return web.Response(
                    body=await page.read(), headers={"Content-Type": page.headers["Content-Type"]}
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(503, f"tritonserver's metrics cannot be read: {error}") from None

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [describe(m) for m in self._models.values()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        return web.json_response(describe(self._model(request.match_info["model"])))

    def _model(self, name: str) -> ServedModel:
        if name not in self._models:
            known = ", ".join(self._models)
            raise ApiError(404, f"no model {name!r}, there is {known}", param="model", code="model_not_found")
        return self._models[name]

    # ---- what is generated

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        begun = time.perf_counter()
        request = parse(CompletionRequest, await self._bodies.read(http))
        model = self._model(request.model)
        with self._admit(len(request.prompt) * request.num_choices):
            prompts = [await encode(model, prompt) for prompt in request.prompt]
            params = request.params(request.max_tokens or DEFAULT_MAX_TOKENS, request.logprobs)
            tokens = model.tokens if request.logprobs is not None else None
            asked = [(ids, each) for ids in prompts for each in params]
            choices: list[Choice] = []
            for index, (ids, _) in enumerate(asked):
                echo = ""
                if request.echo:
                    given = request.prompt[index // len(params)]
                    echo = given if isinstance(given, str) else model.need_text("echo is").decode(given)
                choices.append(TextChoice(index, ids, tokens, bool(request.return_token_ids), echo))
            reply = Reply("text_completion", model, choices, len(params))
            return await self._answer(http, request, Work(asked, choices, reply, begun))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        begun = time.perf_counter()
        request = parse(ChatRequest, await self._bodies.read(http))
        model = self._model(request.model)
        with self._admit(request.num_choices):
            prompt, expected = render(model, request)
            structured = guide(request, expected)
            ids = await encode(model, prompt)
            most = request.most_tokens or max(model.max_len - len(ids), 1)
            params = request.params(most, request.num_logprobs, structured)
            tokens = model.tokens if request.logprobs else None
            with_ids = bool(request.return_token_ids)
            choices = [ChatChoice(i, ids, tokens, with_ids, expected) for i in range(len(params))]
            reply = Reply("chat.completion", model, choices, len(params))
            work = Work([(ids, each) for each in params], choices, reply, begun)
            with contextlib.nullcontext() if structured is None else said_as(request):
                return await self._answer(http, request, work)

    async def _answer(self, http: web.Request, request: ApiRequest, work: Work) -> web.StreamResponse:
        answers = self._wire.ask(request.model, work.asked, work.begun)
        try:
            if request.stream:
                return await stream(http, work, answers, request.stream_options or StreamOptions())
            await answers.each(work.take)
            return web.json_response(work.reply.whole(), headers={"X-Request-Id": work.reply.id})
        except Busy as error:
            raise too_many(error, len(work.asked)) from None
        finally:
            answers.close()

    @contextlib.contextmanager
    def _admit(self, num_requests: int) -> Iterator[None]:
        most = self._limits.max_requests
        if num_requests > most:
            raise ApiError(
                400, f"prompts x n is {num_requests}, the server takes {most} at once; send fewer", param="n"
            )
        if self._num_open + num_requests > most:
            raise ApiError(
                429, f"requests under way: {self._num_open} of {most}; try again in a moment",
                code="rate_limit_exceeded",
            )  # fmt: skip
        self._num_open += num_requests
        try:
            yield
        finally:
            self._num_open -= num_requests


@contextlib.contextmanager
def said_as(request: ChatRequest) -> Iterator[None]:
    """A grammar that we have made is refused by the name under which it was asked for."""
    try:
        yield
    except Refused as error:
        ours, name = "structured_outputs", "tools" if request.forced else "response_format"
        if not str(error).startswith(ours):
            raise
        message = name + str(error).removeprefix(ours)
        raise ApiError(400, message, param=name, code="invalid_value") from None


def too_many(error: Exception, num_asked: int) -> Exception:
    """A batch that the engine never has room for is no matter of coming back later."""
    room = ROOM.search(str(error)) if isinstance(error, Busy) else None
    if room is None or num_asked <= (most := sum(map(int, room.groups()))):
        return error
    rows, queue = map(int, room.groups())
    return ApiError(
        400,
        f"prompts x n is {num_asked}, the engine takes {most} at once"
        f" ({counted(rows, 'row', 'rows')}, max_queue={queue}); send fewer",
        param="n",
    )


async def encode(model: ServedModel, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    text = model.need_text("the prompt is")
    if len(prompt) < LONG_TEXT:
        return text.encode(prompt, model.max_len)
    return await asyncio.to_thread(text.encode, prompt, model.max_len)


async def stream(
    http: web.Request, work: Work, answers: Answers, options: StreamOptions
) -> web.StreamResponse:
    """Events; they begin with the first token, so that what is refused still has its status."""
    await answers.begin()
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": work.reply.id})
    await response.prepare(http)
    events = Events(http, response, work, options)
    try:
        await answers.each(events.take)
        await events.finish()
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # its status has been sent: clients look into the events
        log.warning("%s after its first token: %s", work.reply.id, error)
        await events.send(
            event(ENCODER.encode(api_error(too_many(error, len(work.asked))).body())), last=True
        )
    return response


class Events:
    """An answer as server-sent events: each piece is one write, and the last one the end's, too."""

    def __init__(
        self, http: web.Request, response: web.StreamResponse, work: Work, options: StreamOptions
    ) -> None:
        self._http, self._response, self._work, self._options = http, response, work, options
        self._num_open = len(work.choices)
        self._usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        self._last = ""

    async def take(self, found: Found) -> None:
        choices, reply = self._work.choices, self._work.reply
        text = ""
        for index, piece in found:
            chunks = list(choices[index].chunks(piece))
            if self._options.continuous_usage_stats:
                self._usage = {"usage": reply.usage()}
            text += "".join([reply.event([chunk], self._usage) for chunk in chunks])
        self._num_open -= sum(piece.finish_reason is not None for _, piece in found)
        if self._num_open:
            await self.send(text)
        else:
            self._last = text

    async def finish(self) -> None:
        reply = self._work.reply
        totals = reply.event([], reply.totals()) if self._options.include_usage else ""
        await self.send(self._last + totals + event("[DONE]"), last=True)

    async def send(self, text: str, last: bool = False) -> None:
        data, transport = text.encode(), self._http.transport
        write = self._response.write_eof if last else self._response.write
        if not (data or last):
            return
        if transport is None or transport.get_write_buffer_size() + len(data) < NEVER_WAITS:
            await write(data)
            return
        async with writing(self._http):
            await write(data)


@contextlib.asynccontextmanager
async def writing(http: web.Request) -> AsyncIterator[None]:
    """Waits for a client to read, slowly if it likes, but not for ever."""
    watch = None
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S) as limit:
            watch = asyncio.create_task(extend(limit, http))
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_TIMEOUT_S:g} s") from None
    finally:
        if watch is not None:
            watch.cancel()


async def extend(limit: asyncio.Timeout, http: web.Request) -> None:
    """Moves the limit whenever the client has read something."""
    before = unread(http)
    while True:
        await asyncio.sleep(WRITE_TIMEOUT_S / LOOKS)
        if limit.expired():
            return
        if (now := unread(http)) != before:
            before = now
            limit.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)


def unread(http: web.Request) -> int:
    """Bytes that the client's machine has not taken yet: those of asyncio, and those of the kernel."""
    transport = http.transport
    if transport is None or transport.is_closing():
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def describe(model: ServedModel) -> dict[str, Any]:
    own = {"owned_by": "hemiola", "max_model_len": model.max_len}
    return {"id": model.name, "object": "model", "created": model.created, **own}


def http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """What aiohttp says, such as 404 or 413."""
    match error.status:
        case 404:
            return ApiError(404, f"no {request.path} here; docs/openai.md lists the routes", code="not_found")
        case 405:
            return ApiError(405, f"{request.path} does not take {request.method}", code="method_not_allowed")
        case status:
            return ApiError(status, error.text or error.reason)


def error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status, headers=error.headers)
