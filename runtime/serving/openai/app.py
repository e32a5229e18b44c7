"""The routes: a body becomes requests to tritonserver, their pieces an answer or a stream of events."""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from hemiola import __version__
from hemiola.runtime.errors import Busy, Refused
from hemiola.runtime.serving.openai.body import Bodies
from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.errors import ApiError, api_error
from hemiola.runtime.serving.openai.events import Work, stream, too_many, writing
from hemiola.runtime.serving.openai.guide import guide
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.page import engines_page
from hemiola.runtime.serving.openai.reply import ChatChoice, Choice, Reply, TextChoice
from hemiola.runtime.serving.openai.response_reply import ResponseChoice, ResponseReply
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import (
    DEFAULT_MAX_TOKENS,
    ApiRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    parse,
)
from hemiola.runtime.serving.openai.tokenizing import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from hemiola.runtime.serving.openai.wire import Wire
from hemiola.runtime.text import LONG_TEXT

log = logging.getLogger("hemiola.openai")
METRICS_TIMEOUT_S = 5.0
OPEN = {"/health", "/metrics", "/version"}  # need no key
Kind = TypeVar("Kind", bound=Body)
Answer = Awaitable[web.StreamResponse]
Handler = Callable[[web.Request], Answer]


@dataclass(frozen=True)
class FrontLimits:
    """What the front takes."""

    max_requests: int = 1024  # under way at once; each choice of each prompt is one
    max_body: int = 16 * 2**20  # bytes
    api_keys: tuple[str, ...] = ()  # none: everybody


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
                web.post("/v1/completions", self._taking(CompletionRequest, self._complete)),
                web.post("/v1/chat/completions", self._taking(ChatRequest, self._chat)),
                web.post("/v1/responses", self._taking(ResponsesRequest, self._respond)),
                web.get("/version", self._version),
                web.post("/tokenize", self._taking(TokenizeRequest, self._tokenize)),
                web.post("/detokenize", self._taking(DetokenizeRequest, self._detokenize)),
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
        if not self._limits.api_keys or request.path in OPEN:
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
        """What tritonserver's page says of the engines."""
        timeout = aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._metrics_url) as page,
            ):
                return web.Response(
                    text=engines_page(await page.text()),
                    headers={"Content-Type": "text/plain; version=0.0.4"},
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(503, f"tritonserver's metrics cannot be read: {error}") from None

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [describe(m) for m in self._models.values()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        return web.json_response(describe(self._model(request.match_info["model"])))

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _tokenize(self, _: web.Request, request: TokenizeRequest, begun: float) -> web.Response:
        return web.json_response(await tokenize(self._model(request.model), request))

    async def _detokenize(self, _: web.Request, request: DetokenizeRequest, begun: float) -> web.Response:
        return web.json_response(detokenize(self._model(request.model), request))

    def _taking(self, kind: type[Kind], answer: Callable[[web.Request, Kind, float], Answer]) -> Handler:
        """Reads a body of this kind. What is refused from there on has the names of its fields."""

        async def handle(http: web.Request) -> web.StreamResponse:
            begun = time.perf_counter()
            request = parse(kind, await self._bodies.read(http))
            try:
                return await answer(http, request, begun)
            except Refused as error:
                raise api_error(error, request.names()) from None

        return handle

    def _model(self, name: str) -> ServedModel:
        if name not in self._models:
            known = ", ".join(self._models)
            raise ApiError(404, f"no model {name!r}, there is {known}", param="model", code="model_not_found")
        return self._models[name]

    # ---- what is generated

    async def _complete(
        self, http: web.Request, request: CompletionRequest, begun: float
    ) -> web.StreamResponse:
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
                    echo = given if isinstance(given, str) else model.need_text("echo").decode(given)
                choices.append(TextChoice(index, ids, tokens, bool(request.return_token_ids), echo))
            reply = Reply("text_completion", model, choices, len(params))
            return await self._answer(http, request, Work(asked, choices, reply, begun))

    async def _chat(self, http: web.Request, request: ChatRequest, begun: float) -> web.StreamResponse:
        model = self._model(request.model)
        with self._admit(request.num_choices):
            prompt, expected = render(model, request)
            structured = guide(request, expected)
            ids = await encode(model, prompt, special=False)
            most = request.most_tokens or max(model.max_len - len(ids), 1)
            params = request.params(most, request.num_logprobs, structured)
            tokens = model.tokens if request.logprobs else None
            with_ids = bool(request.return_token_ids)
            choices = [ChatChoice(i, ids, tokens, with_ids, expected) for i in range(len(params))]
            reply = Reply("chat.completion", model, choices, len(params))
            work = Work([(ids, each) for each in params], choices, reply, begun)
            return await self._answer(http, request, work)

    async def _respond(
        self, http: web.Request, request: ResponsesRequest, begun: float
    ) -> web.StreamResponse:
        model, chat = self._model(request.model), request.chat()
        with self._admit(1):
            prompt, expected = render(model, chat)
            structured = guide(chat, expected)
            ids = await encode(model, prompt, special=False)
            most = request.max_output_tokens or max(model.max_len - len(ids), 1)
            (params,) = chat.params(most, None, structured)
            choice = ResponseChoice(ids, expected)
            work = Work([(ids, params)], [choice], ResponseReply(model, request, choice), begun)
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
            said = f"prompts x n is {num_requests}, the server takes {most} at once"
            raise Refused("too_long", "n", said=said, way_out="send fewer")
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


async def encode(model: ServedModel, prompt: str | list[int], special: bool = True) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    text = model.need_text("prompt")
    if len(prompt) < LONG_TEXT:
        return text.encode(prompt, model.max_len, special)
    return await asyncio.to_thread(text.encode, prompt, model.max_len, special)


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
