"""The client's calls for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from hemiola.runtime.api import Output, Piece, Prompt, SamplingParams, pairs
from hemiola.runtime.errors import Busy, Lost, Refused
from hemiola.runtime.serving.packing import (
    MAX_IN_FLIGHT,
    READY_TIMEOUT_S,
    Chat,
    cancellation,
    channel_options,
    pack,
    pb2,
    read_output,
)

import grpc  # isort: skip  # after packing, which says how to install it

from hemiola.runtime.serving.client import RETRY_S
from hemiola.runtime.serving.wire import Said, Wire


class AsyncClient:
    """A model on a running `hemiola serve`, to be used within one event loop; retries as those of Client."""

    def __init__(self, url: str = "127.0.0.1:8001", model: str = "hemiola", *, retries: int = 2) -> None:
        self.url = url
        self.model = model
        self.retries = retries
        self._wire = Wire(url, channel_options(url))

    async def check(self) -> None:
        """Refuses a server, or a model, that is not there."""
        try:
            asked = pb2.ModelReadyRequest(name=self.model)
            ready: bool = (await self._wire.stub.ModelReady(asked, timeout=READY_TIMEOUT_S)).ready
        except grpc.RpcError as error:
            said = f"no server answers at {self.url} ({error.details()})"
            raise Refused("not_found", "url", said=said, way_out="start `hemiola serve`") from None
        if not ready:
            said = f"the server at {self.url} has no model {self.model!r} that is ready"
            raise Refused("not_found", "model", said=said, way_out="pass another")

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
        params = params or SamplingParams()
        request = pack(self.model, prompt, params, stream=True, timeout_s=timeout_s, request_id=request_id)
        async with aclosing(self._said(request)) as answer:
            async for said in answer:
                assert said.piece is not None
                yield said.piece

    async def chat(
        self, messages: Chat, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Output:
        """The answer to a conversation, by the checkpoint's chat template; `stream` takes messages, too."""
        params = params or SamplingParams()
        return await self._output(pack(self.model, messages, params, stream=False, timeout_s=timeout_s))

    async def cancel(self, request_id: str) -> None:
        """End a request, whoever sent it; one that has ended is left alone."""
        call = self._wire.stub.ModelStreamInfer()
        await call.write(cancellation(self.model, request_id))
        await call.done_writing()
        async for _ in call:
            pass

    async def _output(self, request: Any) -> Output:
        output: Output | None = None
        async with aclosing(self._said(request)) as answer:
            async for said in answer:
                assert said.piece is not None
                if said.input_ids is not None:  # the last, and only, response
                    output = read_output(said.piece, said.input_ids)
        assert output is not None
        return output

    async def _said(self, request: Any) -> AsyncGenerator[Said, None]:
        given = False
        for tried in range(self.retries + 1):
            try:
                async with aclosing(self._attempt(request)) as answer:
                    async for said in answer:
                        given = True
                        yield said
                return
            except (Busy, Lost) as error:
                if given or tried == self.retries:
                    raise
                seconds = error.retry_after_s if isinstance(error, Busy) else RETRY_S * 2**tried
            await asyncio.sleep(seconds)

    async def _attempt(self, request: Any) -> AsyncGenerator[Said, None]:
        queue: asyncio.Queue[Said] = asyncio.Queue()
        exchange = self._wire.begin(request, 0, queue.put)
        try:
            while True:
                said = await queue.get()
                if said.error is not None:
                    raise said.error
                yield said
                if said.piece is not None and said.piece.finish_reason is not None:
                    return
        finally:
            if not exchange.task.done():
                exchange.cancel()

    async def close(self) -> None:
        """Cancels what is in flight and ends the connection."""
        await self._wire.close()

    async def __aenter__(self) -> "AsyncClient":
        try:
            await self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
