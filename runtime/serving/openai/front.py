"""The front as a thread of `hemiola serve`: a port, an event loop, and a clean end."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hemiola.runtime.serving.openai.app import App, FrontLimits
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.wire import Wire
from hemiola.runtime.serving.packing import CHANNEL, NO_PROXY
from hemiola.runtime.serving.tritonserver import bind

log = logging.getLogger("hemiola.openai")
BACKLOG = 1024
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


class Front:
    """Holds its port from the beginning, but listens only while entered."""

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
        self._socket = bind(host, port, "OpenAI", listens=False)  # until engines are ready
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}/v1"
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="openai-front", daemon=True)

    def start(self, grpc_url: str, metrics_url: str, door_key: str = "") -> None:
        """Returns when it listens. door_key: with it, engines are told when a request came (arrival.py)."""
        self._door_key = door_key
        self._grpc_url, self._metrics_url = grpc_url, metrics_url
        self._thread.start()
        self._loop = self._started.result()

    def refuse(self) -> None:
        """New connections are refused; answers under way may finish for exit_timeout_s. Does not wait."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                self._loop.call_soon_threadsafe(self._ending.set)

    def stop(self) -> None:
        """Refuses, and waits for answers under way."""
        self.refuse()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            log.exception("the OpenAI front ended")

    async def _serve(self) -> None:
        wire = Wire(self._grpc_url, (*CHANNEL, NO_PROXY), self._door_key)
        app = App(self._models, wire, self._metrics_url, self._limits)
        runner = web.AppRunner(
            app.routes(),
            handler_cancellation=True,  # a client that leaves ends its requests
            access_log=None,
            logger=wire_log,
            keepalive_timeout=IDLE_TIMEOUT_S,  # counted from the connection or its last answer
            shutdown_timeout=self._exit_timeout_s,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket, backlog=BACKLOG).start()
            self._started.set_result(asyncio.get_running_loop())
            await self._ending.wait()
        finally:
            await runner.cleanup()
            await wire.close()
