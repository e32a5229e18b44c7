"""An HTTP request as it arrives, read within limits: its head, and where its body ends."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

from hemiola.runtime.serving import arrival

MAX_HEAD = 2**16  # bytes
MAX_LINE = 8000  # bytes of one of its lines; tritonserver closes a connection with a longer one unanswered
MAX_BODY = 16 * 2**20
MAX_TRAILERS = 100
MOST_EMPTY = 8  # lines before the first
MOST_CHUNKS = 2**16  # of a body; each costs some microseconds
IN_A_TURN = 64  # chunks that are read before the loop serves others: none of those that are there waits
CUT = "is cut: the connection ends before it does; send all of it"
CHUNK = 2**16  # bytes that are read at once
OURS = {
    b"connection", b"content-length", b"content-type", b"expect", b"keep-alive", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", arrival.NAME.encode(),
}  # fmt: skip  # headers that our door writes, or that end there
FIRST_LINE = re.compile(rb"(?!CONNECT )([A-Z]{1,20} )(?:https?://[!-.0-~]+)?(/[!-~\x80-\xff]* HTTP/1\.[01])")
HEADER = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):([\t -~\x80-\xff]*)")
ONCE = (b"content-length", b"transfer-encoding", b"content-encoding")
LENGTH = re.compile(rb"[0-9]{1,19}")
CHUNK_LENGTH = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r\n")


class Refusal(Exception):
    """A request that does not go on, and its status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status

    def __reduce__(self) -> tuple[type["Refusal"], tuple[HTTPStatus, str]]:
        return Refusal, (self.status, str(self))


class RequestHead(NamedTuple):
    first_line: bytes
    kept: list[bytes]  # headers that go on
    length: int | None  # of the body; None: it comes in chunks
    continues: bool  # the client waits to be told before it sends the body


async def read_head(reader: asyncio.StreamReader) -> RequestHead:
    """Line by line, so that a bare LF is refused at once. Empty lines may stand before the first line."""
    first_line = b""
    for _ in range(MOST_EMPTY + 1):
        if first_line := await _line(reader, HTTPStatus.REQUEST_URI_TOO_LONG, "the first line"):
            break
    first = FIRST_LINE.fullmatch(first_line)
    if first is None:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the first line is no HTTP; send METHOD /PATH HTTP/1.1")
    kept, headers, left = [], {}, MAX_HEAD
    while line := await _line(reader, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a header"):
        left -= len(line)
        if left < 0:
            why = f"the headers have more than {MAX_HEAD} bytes; send less"
            raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why)
        matched = HEADER.fullmatch(line)
        if matched is None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a header is no HTTP; correct it")
        name = matched[1].lower()
        if name in ONCE and name in headers:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{name.decode()} is given twice; give it once")
        headers[name] = matched[2].strip()
        if name not in OURS:
            kept.append(line)
    coding = headers.get(b"content-encoding") or b"identity"
    if coding.lower() != b"identity":
        why = f"the body is sent with Content-Encoding {coding[:80].decode('latin-1')}; send it plain"
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
    without_host = first[1] + first[2]  # of many hosts tritonserver closes the connection unanswered
    continues = headers.get(b"expect", b"").lower() == b"100-continue"
    return RequestHead(without_host, kept, _length(headers), continues)


async def _line(reader: asyncio.StreamReader, too_long: HTTPStatus, what: str) -> bytes:
    """A line of the head, without its end."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        line = b"\r\n".rjust(MAX_LINE + 3)
    except asyncio.IncompleteReadError as error:
        if not error.partial and too_long is HTTPStatus.REQUEST_URI_TOO_LONG:
            raise  # nothing was asked
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the head {CUT}") from None
    if len(line) > MAX_LINE + 2:
        raise Refusal(too_long, f"{what} has more than {MAX_LINE} bytes; send less")
    if not line.endswith(b"\r\n"):
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{what} does not end in CR LF; correct it")
    return line[:-2]


def _length(headers: Mapping[bytes, bytes]) -> int | None:
    coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length", b"0")
    if coding is None and LENGTH.fullmatch(length):
        return int(length)
    if coding is not None and coding.lower() == b"chunked" and b"content-length" not in headers:
        return None
    right = "send Content-Length, or Transfer-Encoding: chunked"
    raise Refusal(HTTPStatus.BAD_REQUEST, f"the length of the body is not clear; {right}")


async def read_body(head: RequestHead, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Pieces of a body, none of which is large."""
    if head.length is not None:
        async for piece in _pieces(reader, head.length):
            yield piece
        return
    async for length in _chunks(reader):
        async for piece in _pieces(reader, length):
            yield piece


async def _pieces(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        piece = await reader.read(min(length, CHUNK))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[int]:
    """The lengths of a chunked body's chunks; whoever asks for the next has read the one before."""
    for number in range(MOST_CHUNKS + 1):
        if number % IN_A_TURN == 0:
            await asyncio.sleep(0)
        length_line = CHUNK_LENGTH.fullmatch(await reader.readuntil(b"\n"))
        if length_line is None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a chunk of the body has no length; correct it")
        if not (length := int(length_line.group(1), 16)):
            break
        if number == MOST_CHUNKS:
            why = f"the body comes in more than {MOST_CHUNKS} chunks; send larger ones"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        yield length
        if await reader.readexactly(2) != b"\r\n":
            raise Refusal(HTTPStatus.BAD_REQUEST, "a chunk of the body is longer than it says; correct it")
    for _ in range(MAX_TRAILERS):  # trailers, which nobody needs
        if await reader.readuntil(b"\n") == b"\r\n":
            return
    raise Refusal(HTTPStatus.BAD_REQUEST, "the body has too many trailers; leave them out")
