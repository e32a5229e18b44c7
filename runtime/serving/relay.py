"""One exchange with tritonserver: the request goes to it whole, the answer comes back as it is made."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from hemiola.runtime.serving.http_request import CHUNK, MAX_LINE, Refusal
from hemiola.runtime.serving.slow_reader import never_waits, writing

HEAD = b"HEAD "
LAST_CHUNK = b"0\r\n\r\n"
STREAM = (b"\r\ncontent-type: text/event-stream", b"\r\ntransfer-encoding: chunked")
CHUNKED = re.compile(rb"transfer-encoding:\s*chunked\s*", re.IGNORECASE)
EDGE = b"\n\r\n"  # of a chunk: events end with an empty line, and so do headers


async def exchange(
    target: Path,
    request: list[bytes],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    reason: Callable[[], str],
) -> None:
    """Until tritonserver's answer has ended, or its client has left: then tritonserver is left, too.

    request: one, which is taken out: an answer may take minutes, and need not hold it. reason: why the server
    ends, if it does.
    """
    try:
        answer, asked = await asyncio.open_unix_connection(target)
    except OSError:
        why = reason() or "tritonserver does not answer; try again in a moment"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, why) from None
    relayed = _relay(request, asked, answer, writer, reason)
    parts = [asyncio.create_task(part) for part in (relayed, left(reader))]
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if parts[0].done():
            parts[0].result()
    finally:
        for part in parts:
            part.cancel()
        asked.transport.abort()
        await asyncio.wait(parts)  # whoever refuses reads on, and only one may read


async def _relay(
    request: list[bytes],
    asked: asyncio.StreamWriter,
    answer: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    reason: Callable[[], str],
) -> None:
    """The answer, piece by piece. A client that reads nothing of it for a time is left."""
    is_old = request[0].partition(b"\r\n")[0].endswith(b" HTTP/1.0")
    is_head = request[0].startswith(HEAD)
    asked.write(b"GET " + request.pop().removeprefix(HEAD) if is_head else request.pop())
    with contextlib.suppress(OSError):  # what it has said before it closed is the answer
        await asked.drain()
    passed = Passed()
    changed = OnlyHead() if is_head else Unchunked() if is_old else None
    while piece := await _read(answer):
        passed.add(piece)
        await _write(writer, piece if changed is None else changed.take(piece))
    if not passed.tail:
        why = reason() or "tritonserver closed the connection without an answer; try again in a moment"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE if reason() else HTTPStatus.BAD_GATEWAY, why)
    if passed.is_cut_stream:
        why = reason() or "tritonserver ended before the answer did"
        event = f"data: {json.dumps({'error': why})}\n\n".encode()
        await _write(writer, event if is_old else b"%x\r\n%b\r\n%b" % (len(event), event, LAST_CHUNK))
    writer.close()
    async with writing(writer.transport):
        await writer.wait_closed()


async def _read(answer: asyncio.StreamReader) -> bytes:
    """b"" where the server closed it, was killed, or has so many connections that this is none yet."""
    try:
        return await answer.read(CHUNK)
    except OSError:
        return b""


async def _write(writer: asyncio.StreamWriter, piece: bytes) -> None:
    watched = not never_waits(writer.transport, len(piece))
    writer.write(piece)
    if watched:
        async with writing(writer.transport):
            await writer.drain()


class OnlyHead:
    """An answer to HEAD, which tritonserver does not know: that to GET without its body."""

    def __init__(self) -> None:
        self._held = b""
        self._ended = False

    def take(self, piece: bytes) -> bytes:
        """What of it goes on."""
        if self._ended:
            return b""
        self._held += piece
        head, end, _ = self._held.partition(b"\r\n\r\n")
        self._ended = bool(end)
        return head + end if end else b""


class Unchunked:
    """An answer for a client of HTTP/1.0, which knows no chunks: the connection's end is the body's."""

    def __init__(self) -> None:
        self._held = b""
        self._in_head = True
        self._is_chunked = True
        self._chunk_len = 0  # bytes of this chunk that have not come yet

    def take(self, piece: bytes) -> bytes:
        """What of it can go on."""
        self._held += piece
        head = self._take_head() if self._in_head else b""
        if self._in_head:
            return b""
        if not self._is_chunked:
            body, self._held = self._held, b""
            return head + body
        return head + b"".join(iter(self._take_part, b""))

    def _take_head(self) -> bytes:
        head, ends, rest = self._held.partition(b"\r\n\r\n")
        if not ends:
            return b""
        lines = head.split(b"\r\n")
        kept = [line for line in lines if CHUNKED.fullmatch(line) is None]
        self._held, self._in_head, self._is_chunked = rest, False, len(kept) < len(lines)
        return b"\r\n".join([*kept, b"", b""])

    def _take_part(self) -> bytes:
        """As much of a chunk as is there."""
        while not self._chunk_len:
            line, ends, rest = self._held.partition(b"\r\n")
            if not ends:
                return b""
            self._held = rest
            self._chunk_len = int(line.partition(b";")[0] or b"0", 16)  # empty: the end of the chunk before
        part, self._held = self._held[: self._chunk_len], self._held[self._chunk_len :]
        self._chunk_len -= len(part)
        return part


class Passed:
    """What of an answer has passed, as far as it matters at its end."""

    def __init__(self) -> None:
        self._head = b""
        self.tail = b""

    def add(self, piece: bytes) -> None:
        if b"\r\n\r\n" not in self._head and len(self._head) < MAX_LINE:
            self._head += piece[:MAX_LINE]
        self.tail = (self.tail + piece)[-len(LAST_CHUNK) :]

    @property
    def is_cut_stream(self) -> bool:
        """A stream of events that ended before its last chunk, between two of them."""
        head = self._head.partition(b"\r\n\r\n")[0].lower()
        is_stream = all(header in head for header in STREAM)
        return is_stream and self.tail != LAST_CHUNK and self.tail.endswith(EDGE)


async def left(reader: asyncio.StreamReader) -> None:
    """Until the client has left. Another request on its connection is not answered."""
    while await reader.read(CHUNK):
        pass
