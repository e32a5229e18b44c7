"""The front as a thread of `hemiola serve`: a port, an event loop, and a clean end."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hemiola.runtime.serving.door import CLOSE_S, FLUSH_S, Door
from hemiola.runtime.serving.openai.app import App, FrontLimits
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.packing import CHANNEL, NO_PROXY
from hemiola.runtime.serving.ports import bind
from hemiola.runtime.serving.wire import Wire

log = logging.getLogger("hemiola.openai")
DRAIN_S = 0.02  # between looks at answers under way
LATE = "this answer did not end within {:g} s (--exit-timeout)"
IDLE_TIMEOUT_S = 75.0  # for a request's headers to arrive; more than the 60 s of usual proxies


class NoHttp(logging.Filter):
    """What is no HTTP is its sender's affair; it may hold a key, or be what was meant as a prompt.

    Clients that left have their line by App.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return True
        log.debug("a request that is no HTTP: %s", type(error).__name__)
        return False


wire_log = logging.getLogger("hemiola.openai.http")
wire_log.addFilter(NoHttp())


class Front(Door):
    """The port of the OpenAI-compatible API."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: FrontLimits = FrontLimits(),  # noqa: B008  # frozen
        exit_timeout_s: float = 30,
    ) -> None:
        self._models = models
        self._limits = limits
        self._exit_timeout_s = exit_timeout_s
        held = bind(host, port, "OpenAI", listens=False)  # until engines are ready
        self.host = host
        self.port: int = held.getsockname()[1]
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}/v1"
        super().__init__("openai-front", {"openai": held}, log)

    def start(self, grpc_url: str, metrics_url: str, door_key: str = "") -> None:
        """Returns when it listens. door_key: with it, engines are told when a request came (arrival.py)."""
        self._door_key = door_key
        self._grpc_url, self._metrics_url = grpc_url, metrics_url
        self._open()

    def stop(self) -> None:
        """Refuses, and waits for answers under way: they have exit_timeout_s from the first `refuse` on."""
        self.refuse()
        if self._thread.is_alive():
            end = self._refused_at + self._exit_timeout_s + CLOSE_S
            self._thread.join(max(0.0, end - time.monotonic()))
        self.close()

    async def _serve(self) -> None:
        wire = Wire(self._grpc_url, (*CHANNEL, NO_PROXY), self._door_key, lambda: self.reason)
        app = App(self._models, wire, self._metrics_url, self._limits, lambda: self.refuses)
        runner = web.AppRunner(
            app.routes(),
            handler_cancellation=True,  # a client that leaves ends its requests
            access_log=None,
            logger=wire_log,
            auto_decompress=False,  # body.py does it
            keepalive_timeout=IDLE_TIMEOUT_S,  # counted from the connection or its last answer
            shutdown_timeout=FLUSH_S,
        )
        await runner.setup()
        try:
            handlers = runner.server
            assert handlers is not None
            listening = await self._listen(
                self._sockets["openai"], handlers, lambda: len(handlers.connections)
            )
            self._is_open()
            await self._refusing.wait()
            await self._stop_listening(listening)
            await self._drain(app)
            app.end(self.reason or f"the server ends, and {LATE.format(self._exit_timeout_s)}")
        finally:
            await runner.cleanup()
            await wire.close(FLUSH_S)
            app.close()

    async def _drain(self, app: App) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._exit_timeout_s):
                while app.num_answering and not self._ending.is_set():
                    await asyncio.sleep(DRAIN_S)
