"""Bodies of requests, as they arrive: how long that may take, and how much memory."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Iterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hemiola.runtime.serving.openai.errors import ApiError

BODY_TIMEOUT_S = 60.0  # for a body to arrive
MOST_BODIES = 16  # of the largest size, on their way at once
SMALL_BODY = 2**16  # bytes; these have always room
PIECE = 2**18  # bytes that are unpacked at once
GZIP = 16 + zlib.MAX_WBITS


class Bodies:
    """Reads bodies, as many at once as memory is meant for."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._num_bytes = 0  # of bodies that are not whole yet, or that nobody has looked into yet
        self.num_reading = 0

    @contextlib.asynccontextmanager
    async def held(self, http: web.Request) -> AsyncIterator[bytearray]:
        """A body, which counts as long as it is needed: large ones wait for each other."""
        body = await self.read(http)
        try:
            yield body
        finally:
            self._num_bytes -= len(body)

    async def read(self, http: web.Request) -> bytearray:
        """Counted until `held` is left."""
        body, is_whole, gunzip = bytearray(), False, gunzip_for(http)
        if (http.content_length or 0) > self._max_body:
            raise self._too_large()
        self.num_reading += 1
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while chunk := await http.content.readany():
                    for piece in [chunk] if gunzip is None else gunzip.feed(chunk):
                        body += piece
                        self._num_bytes += len(piece)
                        self._check(len(body))
                        await asyncio.sleep(0)
            if gunzip is not None:
                gunzip.check_end()
            is_whole = True
            return body
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            ) from None
        except (web.RequestPayloadError, HttpProcessingError, zlib.error) as error:
            raise ApiError(
                400, f"the body cannot be read: {reason_of(error)}; send it plain, or gzip"
            ) from None
        finally:
            self._num_bytes -= 0 if is_whole else len(body)
            self.num_reading -= 1

    def _check(self, own_len: int) -> None:
        if own_len > self._max_body:
            raise self._too_large()
        max_bytes = MOST_BODIES * self._max_body
        if own_len > SMALL_BODY and self._num_bytes > max_bytes:
            raise ApiError(
                429, f"bodies of more than {max_bytes} bytes are on their way; try again in a moment",
                code="rate_limit_exceeded",
            )  # fmt: skip

    def _too_large(self) -> ApiError:
        why = f"the body is too large: more than {self._max_body} bytes; send less"
        return ApiError(413, why, code="body_too_large")


class Gunzip:
    """A gzip body, unpacked as it comes in pieces of at most PIECE bytes."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        piece = b""
        while data or (len(piece) == PIECE and not self._member.eof):
            if self._member.eof:  # another member follows
                self._member = zlib.decompressobj(GZIP)
            piece = self._member.decompress(data, PIECE)
            data = self._member.unconsumed_tail or self._member.unused_data
            yield piece

    def check_end(self) -> None:
        if not self._member.eof:
            raise zlib.error("it ends within its gzip data")


def gunzip_for(http: web.Request) -> Gunzip | None:
    """None: the body is plain."""
    given = ",".join(http.headers.getall("Content-Encoding", ()))
    codings = [
        coding for word in given.lower().split(",") if (coding := word.strip()) not in ("", "identity")
    ]
    if not codings:
        return None
    if codings == ["gzip"]:
        return Gunzip()
    raise ApiError(
        415, f"the body is sent with Content-Encoding {given[:80]}; send it plain, or gzip",
        code="unsupported_content_encoding",
    )  # fmt: skip


def reason_of(error: Exception) -> str:
    """aiohttp's or zlib's, in one line."""
    return str(error).removeprefix("400, message:").strip().partition("\n")[0]
