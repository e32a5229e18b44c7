"""The HTTP doors of a server, before tritonserver's own, which only listens on sockets of a private folder.

Some requests end tritonserver 2.51: its HTTP server (evhtp) copies a form body, or a query, to the stack
(`evhtp_parse_query_wflags`), and its JSON parser recurses once per open bracket. So a request is read whole
here, within limits of size and time, and goes on as JSON of known length; the answer passes as it comes. A
connection carries one request: nobody has to find out where an answer ends.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path

from hemiola.runtime.errors import Lost, Refused, one_line
from hemiola.runtime.json_file import Repeated, parse_json
from hemiola.runtime.serving import arrival, ending
from hemiola.runtime.serving.aside import Aside
from hemiola.runtime.serving.door import FLUSH_S, Door
from hemiola.runtime.serving.generate_body import GENERATE, REFUSED, check_generate
from hemiola.runtime.serving.http_request import (
    CUT,
    MAX_BODY,
    MAX_HEAD,
    Refusal,
    RequestHead,
    read_body,
    read_head,
)
from hemiola.runtime.serving.json_size import check_brackets, check_size, is_dear
from hemiola.runtime.serving.ports import Ports, bind
from hemiola.runtime.serving.relay import HEAD, exchange, left

MAX_BODIES = 16 * MAX_BODY  # bytes, on their way at once
SMALL_BODY = 2**16  # these always have room
HEAD_TIMEOUT_S = 15.0
BODY_TIMEOUT_S = 60.0
LINGER_S = 5.0  # for a refused client to see why, while it still sends
UNREAD = "the request could not be read; send it again"
LATE = "did not arrive in time; send the request again"


class Guard(Door):
    """The HTTP ports of a server."""

    def __init__(self, host: str, ports: Ports, door_key: str = "") -> None:
        self._door_key = door_key
        sockets = {"http": bind(host, ports.http, "http", listens=False)}
        try:
            sockets["metrics"] = bind(host, ports.metrics, "metrics", listens=False)
        except Refused:
            sockets["http"].close()
            raise
        self.ports = {name: int(held.getsockname()[1]) for name, held in sockets.items()}
        self._num_bytes = 0  # of bodies that have not gone on yet
        self._reading: set[asyncio.Task[None]] = set()  # connections whose request is not whole
        self._answering: set[asyncio.Task[None]] = set()
        self._aside = Aside()
        self._dear = ThreadPoolExecutor(1, "http-guard-dear")  # waits for it; other bodies do not wait behind
        super().__init__("http-guard", sockets, logging.getLogger("hemiola.http"))

    def start(self, targets: Mapping[str, Path]) -> None:
        """Returns when it listens. targets: tritonserver's sockets, by our names."""
        self._targets = targets
        self._open()

    async def _serve(self) -> None:
        servers = [
            await self._listen(held, partial(self._protocol, self._targets[name]), lambda: self._num_open)
            for name, held in self._sockets.items()
        ]
        self._is_open()
        await self._refusing.wait()
        await self._stop_listening(*servers)
        await self._ending.wait()
        for task in self._reading:
            task.cancel()
        self._aside.close()
        self._dear.shutdown(wait=False)
        if last := self._reading | self._answering:
            await asyncio.wait(last, timeout=FLUSH_S)

    @property
    def _num_open(self) -> int:
        return len(self._reading) + len(self._answering)

    def _protocol(self, target: Path) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(
            asyncio.StreamReader(limit=MAX_HEAD), partial(self._connection, target)
        )

    async def _connection(
        self, target: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task, head = asyncio.current_task(), None
        assert task is not None
        self._reading.add(task)
        try:
            head = await self._read_head(reader)
            request = [await self._read(head, reader, writer)]  # `exchange` takes it out
            self._reading.discard(task)
            self._answering.add(task)
            await exchange(target, request, reader, writer, lambda: self.reason)
        except Refusal as refusal:
            await refuse(refusal, reader, writer, head)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # nobody is there to be told
        except asyncio.CancelledError:  # the door ends
            # It is not raised again: asyncio 3.11 prints a traceback of each task that ends so.
            if head is not None and task in self._reading:
                reason = self.reason or ending.REASON
                await refuse(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason), reader, writer, head)
        except Exception as error:  # this machine has no thread left, or no memory
            self._log.error("a request failed: %s: %s", type(error).__name__, one_line(error))
            if task in self._reading:
                await refuse(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, UNREAD), reader, writer, head)
        finally:
            self._reading.discard(task)
            self._answering.discard(task)
            writer.transport.abort()

    async def _read(
        self, head: RequestHead, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """The request as it goes on."""
        begun = time.perf_counter()
        if head.length is not None and head.length > MAX_BODY:
            raise too_large()
        if head.continues:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._read_body(head, reader)
        if self.refuses:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, self.reason or ending.REASON)
        mark = f"{arrival.NAME}: {arrival.make_mark(self._door_key, begun)}".encode()
        kept = [head.first_line, *head.kept, b"Connection: close", *([mark] if self._door_key else [])]
        if body or not head.first_line.startswith((b"GET ", HEAD)):
            kept += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        return b"\r\n".join([*kept, b"", body])

    async def _read_head(self, reader: asyncio.StreamReader) -> RequestHead:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                return await read_head(reader)
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"the headers {LATE}") from None

    async def _read_body(self, head: RequestHead, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in read_body(head, reader):
                    body += piece
                    self._num_bytes += len(piece)
                    self._check(len(body))
            if is_dear(body):  # whose reading would hold up all answers
                loop, run = asyncio.get_running_loop(), self._aside.run
                await loop.run_in_executor(self._dear, run, check_content, body, head.first_line)
            elif len(body) > SMALL_BODY:
                await asyncio.to_thread(check_content, body, head.first_line)
            else:
                check_content(body, head.first_line)
            return bytes(body)
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"the body {LATE}") from None
        except asyncio.LimitOverrunError:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a chunk of the body has no length; correct it") from None
        except asyncio.IncompleteReadError:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"the body {CUT}") from None
        except Refused as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from None
        except Lost as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None
        finally:
            self._num_bytes -= len(body)

    def _check(self, length: int) -> None:
        if length > MAX_BODY:
            raise too_large()
        if length > SMALL_BODY and self._num_bytes > MAX_BODIES:
            why = f"bodies of more than {MAX_BODIES} bytes are on their way; try again in a moment"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, why)


def too_large() -> Refusal:
    why = f"the body has more than {MAX_BODY} bytes; send less"
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)


def check_content(body: bytearray, first_line: bytes) -> None:
    """What would end tritonserver, or what it would answer without a word of use."""
    check_size("the body", body)
    check_brackets("the body", body)
    if route := GENERATE.fullmatch(first_line):
        try:
            check_generate(body, one_response=route[1] is None)
        except Refused as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{REFUSED}{error}") from None
    else:
        check_names(body)


def check_names(body: bytearray) -> None:
    """Of two values under one name, tritonserver would take one without a word."""
    try:
        parse_json(body.decode(errors="replace"), unique=True)
    except Repeated as error:
        raise Refused("conflict", message=f"{error}", way_out="give it once") from None
    except ValueError:
        pass  # no JSON: tritonserver says so


async def refuse(
    refusal: Refusal,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    asked: RequestHead | None,  # None: it could not be read
) -> None:
    """Returns when the client has left, when its time is over, or when the door ends."""
    body = json.dumps({"error": str(refusal)}).encode()
    status = refusal.status
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
    sent = b"" if asked is not None and asked.first_line.startswith(HEAD) else body
    if status is HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        head += "Accept-Encoding: identity\r\n"
    with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + sent)
        writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            await left(reader)
