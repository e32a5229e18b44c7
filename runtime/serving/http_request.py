"""An HTTP request as it arrives, read within limits: its head, and where its body ends."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

from hemiola.runtime.serving import arrival

MAX_HEAD = 2**16  # bytes
MAX_BODY = 16 * 2**20
MOST_TRAILERS = 100
CHUNK = 2**16  # bytes that are read at once
OURS = {
    b"connection", b"content-length", b"content-type", b"expect", b"keep-alive", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", arrival.NAME.encode(),
}  # fmt: skip  # headers that our door writes, or that end there
NAME = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
LENGTH = re.compile(rb"[0-9]{1,19}")
CHUNK_LENGTH = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r\n")


class Refusal(Exception):
    """A request that does not go on, and its status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestHead(NamedTuple):
    first_line: bytes
    kept: list[bytes]  # headers that go on
    length: int | None  # of the body; None: it comes in chunks
    continues: bool  # the client waits to be told before it sends the body


def read_head(raw: bytes) -> RequestHead:
    first_line, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept, found = [], {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not NAME.fullmatch(name) or b"\n" in line or b"\r" in line:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a header is no HTTP; correct it")
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding") and name in found:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{name.decode()} is given twice; give it once")
        found[name] = value.strip()
        if name not in OURS:
            kept.append(line)
    if found.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is compressed; send it plain")
    return RequestHead(first_line, kept, _length(found), found.get(b"expect", b"").lower() == b"100-continue")


def _length(found: Mapping[bytes, bytes]) -> int | None:
    coding, length = found.get(b"transfer-encoding"), found.get(b"content-length", b"0")
    if coding is None and LENGTH.fullmatch(length):
        return int(length)
    if coding is not None and coding.lower() == b"chunked" and b"content-length" not in found:
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
    while True:
        found = CHUNK_LENGTH.fullmatch(await reader.readuntil(b"\n"))
        if found is None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a chunk of the body has no length; correct it")
        if not (length := int(found.group(1), 16)):
            break
        yield length
        if await reader.readexactly(2) != b"\r\n":
            raise Refusal(HTTPStatus.BAD_REQUEST, "a chunk of the body is longer than it says; correct it")
    for _ in range(MOST_TRAILERS):  # trailers, which nobody needs
        if await reader.readuntil(b"\n") == b"\r\n":
            return
    raise Refusal(HTTPStatus.BAD_REQUEST, "the body has too many trailers; leave them out")
