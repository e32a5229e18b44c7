"""The client's calls for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from hemiola.runtime.api import Output, Piece, Prompt, SamplingParams, pairs
from hemiola.runtime.errors import Lost
from hemiola.runtime.serving.exchange import (
    CLOSED,
    Answer,
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
    cancellation,
    channel_options,
    check_client,
    pack,
)
from hemiola.runtime.serving.wire import Queued, Wire

import grpc  # isort: skip  # after packing, which says how to install it


class AsyncClient:
    """A model on a running `hemiola serve`, to be used within one event loop; retries as those of Client."""

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "hemiola", *, retries: int = 2) -> None:
        check_client(url, model, retries)
        self.url = url
        self.model = model
        self.retries = retries
        self._server = f"the server at {url}"
        self._wire = Wire(url, channel_options(url), server=self._server)
        self._is_closed = False

    async def check(self) -> None:
        """Refuses a server, or a model, that is not there."""

        async def ask(method: str, request: Any, timeout: float) -> Any:
            self._check_open()
            return await getattr(self._wire.stub, method)(request, timeout=timeout)

        await check_model(ask, self.url, self.model)

    async def generate(
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
        places = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def one(request: Any) -> Output:
            async with places:
                return await self._output(request)

        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces as they come. The request starts with the first; leaving the loop cancels it."""
        params = SamplingParams() if params is None else params
        request = pack(self.model, prompt, params, stream=True, timeout_s=timeout_s, request_id=request_id)
        async with aclosing(self._replies(request)) as replies:
            async for reply in replies:
                assert reply.piece is not None
                yield reply.piece

    async def chat(
        self, messages: Chat, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Output:
        """The answer to a conversation, by the checkpoint's chat template; `stream` takes messages, too."""
        params = SamplingParams() if params is None else params
        return await self._output(pack(self.model, messages, params, stream=False, timeout_s=timeout_s))

    async def cancel(self, request_id: str) -> None:
        """End a request, whoever sent it; one that has ended is left alone."""
        self._check_open()
        request = cancellation(self.model, request_id)
        call = self._wire.stub.ModelStreamInfer(timeout=CANCEL_TIMEOUT_S)
        try:
            await call.write(request)
            await call.done_writing()
            async for response in call:
                check_cancelled(response, self._server)
        except grpc.RpcError as error:
            raise Lost(text_of(error, self._server)) from None

    async def _output(self, request: Any) -> Output:
        async with aclosing(self._replies(request)) as replies:
            (reply,) = [reply async for reply in replies]
        return read_output(reply)

    async def _replies(self, request: Any) -> AsyncGenerator[Received, None]:
        sources: list[Queued] = []

        def begin() -> Queued:
            self._check_open()
            sources.append(self._wire.open(request))
            return sources[-1]

        answer = Answer(begin, self.retries, asyncio.sleep)
        try:
            while True:
                reply = await answer.read()
                yield reply
                if reply.is_last:
                    return
        finally:
            sources[-1].exchange.cancel()

    async def close(self) -> None:
        """Cancels what is in flight and ends the connection."""
        self._is_closed = True
        await self._wire.close(CANCEL_TIMEOUT_S)  # a server may stand still

    def _check_open(self) -> None:
        if self._is_closed:
            raise Lost(CLOSED)

    async def __aenter__(self) -> "AsyncClient":
        try:
            await self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
