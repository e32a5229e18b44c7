"""Bodies of requests, as they arrive: how long that may take, and how much memory."""

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hemiola.runtime.serving.openai.errors import ApiError

BODY_TIMEOUT_S = 60.0  # for a body to arrive
MOST_BODIES = 16  # of the largest size, on their way at once
SMALL_BODY = 2**16  # bytes; these have always room


class Bodies:
    """Reads bodies, as many at once as memory is meant for."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._num_bytes = 0  # of bodies that are not whole yet

    async def read(self, http: web.Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while chunk := await http.content.readany():
                    body += chunk
                    self._num_bytes += len(chunk)
                    self._check(len(body))
            return bytes(body)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            ) from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ApiError(
                400, f"the body cannot be read: {reason_of(error)}; send it plain, or gzip"
            ) from None
        finally:
            self._num_bytes -= len(body)

    def _check(self, own_len: int) -> None:
        if own_len > self._max_body:
            raise ApiError(
                413,
                f"the body is too large: more than {self._max_body} bytes; send less",
                code="body_too_large",
            )
        most = MOST_BODIES * self._max_body
        if own_len > SMALL_BODY and self._num_bytes > most:
            raise ApiError(
                429, f"bodies of more than {most} bytes are on their way; try again in a moment",
                code="rate_limit_exceeded",
            )  # fmt: skip


def reason_of(error: Exception) -> str:
    """aiohttp's, in one line."""
    return str(error).removeprefix("400, message:").strip().partition("\n")[0]
