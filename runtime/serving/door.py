"""Ports that one thread with an event loop serves: guard.py's, and that of the OpenAI front."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from hemiola.runtime.serving import files

FLUSH_S = 1.0  # for the last words of a server that ended
CLOSE_S = 3.0  # for all of the end; whatever takes longer is left alone, in a thread that holds up no exit
BACKLOG = 1024  # connections that the kernel keeps until we take them
AT_ONCE = 16  # that we take before we look at how many there are
TURNS = 4  # of asyncio's loop between taking a connection and the first step of the task that serves it
FULL = b"there are too many connections; try again in a moment\n"
TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(FULL), FULL)
)


class TurnedAway(asyncio.Protocol):
    """A connection beyond those that a door may have."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(TURNED_AWAY)
        transport.close()


class Door(ABC):
    """Holds its ports from the beginning, but listens only once opened."""

    def __init__(self, name: str, sockets: Mapping[str, socket.socket], log: logging.Logger) -> None:
        self._sockets = sockets
        self._log = log
        self.refuses = False  # new requests; set at once, before the loop comes to know of it
        self._refused_at = 0.0  # by time.monotonic
        self.reason = ""  # why answers under way end, once they do
        self._refusing, self._ending = asyncio.Event(), asyncio.Event()
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    async def _serve(self) -> None:
        """Opens, calls `_is_open`, and serves: refuses from `_refusing` on, ends soon after `_ending`."""

    def _open(self) -> None:
        """Returns when it listens."""
        self._thread.start()
        self._loop = self._started.result()

    async def _listen(
        self, held: socket.socket, make: Callable[[], asyncio.BaseProtocol], count: Callable[[], int]
    ) -> asyncio.Server:
        """make: what serves a new connection; count: how many there are."""
        max_connections = files.most_connections()
        server = await asyncio.get_running_loop().create_server(
            lambda: make() if count() < max_connections else TurnedAway(), sock=held, backlog=AT_ONCE
        )
        held.listen(BACKLOG)
        return server

    async def _stop_listening(self, *servers: asyncio.Server) -> None:
        """asyncio forgets to close a connection that it has just taken when its server closes (an assertion
        fails in Server._attach): so these get their tasks before."""
        loop = asyncio.get_running_loop()
        for server in servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    def _is_open(self) -> None:
        self._started.set_result(asyncio.get_running_loop())

    def refuse(self) -> None:
        """New connections and requests are refused; answers under way go on. Does not wait."""
        if not self.refuses:
            self.refuses, self._refused_at = True, time.monotonic()
        self._set(self._refusing)

    def close(self, reason: str = "") -> None:
        """Ends everything within CLOSE_S; streams that are cut end with an event that gives the reason."""
        self.reason = self.reason or reason
        self.refuse()
        self._set(self._ending)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        for held in self._sockets.values():
            held.close()

    def _set(self, event: asyncio.Event) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                self._loop.call_soon_threadsafe(event.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            self._log.exception("%s ended", self._thread.name)
