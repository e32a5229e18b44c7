"""An answer as server-sent events, written as fast as its client reads, but not for ever."""

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Busy, Refused, counted
from hemiola.runtime.serving.openai.errors import api_error
from hemiola.runtime.serving.openai.reply import Choice, Json, Reply
from hemiola.runtime.serving.openai.response_reply import ResponseReply
from hemiola.runtime.serving.openai.schema import StreamOptions
from hemiola.runtime.serving.openai.wire import Answers, Found

log = logging.getLogger("hemiola.openai")
WRITE_TIMEOUT_S = 60.0  # for a client to read anything of what fills its socket
LOOKS = 20  # within that time, at what it has read
NEVER_WAITS = 2**15  # bytes; asyncio holds twice as many back before a writer has to wait


class Work(NamedTuple):
    """A body as requests to the engine: one for each choice."""

    asked: list[tuple[list[int], SamplingParams]]
    choices: Sequence[Choice]
    reply: Reply | ResponseReply
    begun: float  # when its headers had come in, by time.perf_counter

    async def take(self, found: Found) -> None:
        for index, piece in found:
            self.choices[index].take(piece)


def too_many(error: Exception, num_asked: int) -> Exception:
    """A batch that the engine never has room for is no matter of coming back later."""
    most = error.max_rows + error.max_queue if isinstance(error, Busy) else 0
    if not isinstance(error, Busy) or not 0 < most < num_asked:
        return error
    room = f"{counted(error.max_rows, 'row', 'rows')}, max_queue={error.max_queue}"
    said = f"prompts x n is {num_asked}, the engine takes {most} at once ({room})"
    return Refused("too_long", "n", said=said, way_out="send fewer")


async def stream(
    http: web.Request, work: Work, answers: Answers, options: StreamOptions
) -> web.StreamResponse:
    """Events; they begin with the first token, so that what is refused still has its status."""
    await answers.begin()
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": work.reply.id})
    await response.prepare(http)
    events = Events(http, response, work, options)
    try:
        await answers.each(events.take)
        await events.finish()
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # its status has been sent: clients look into the events
        log.warning("%s after its first token: %s", work.reply.id, error)
        await events.send(work.reply.failed(api_error(too_many(error, len(work.asked)))), last=True)
    return response


class Events:
    """An answer as server-sent events: each piece is one write, and the last one the end's, too."""

    def __init__(
        self, http: web.Request, response: web.StreamResponse, work: Work, options: StreamOptions
    ) -> None:
        self._http, self._response, self._work, self._options = http, response, work, options
        self._num_open = len(work.choices)
        self._usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        self._last = ""

    async def take(self, found: Found) -> None:
        choices, reply = self._work.choices, self._work.reply
        text = ""
        for index, piece in found:
            chunks: list[Json] = choices[index].chunks(piece)
            if self._options.continuous_usage_stats:
                self._usage = {"usage": reply.usage()}
            text += "".join([reply.event([chunk], self._usage) for chunk in chunks])
        self._num_open -= sum(piece.finish_reason is not None for _, piece in found)
        if self._num_open:
            await self.send(text)
        else:
            self._last = text

    async def finish(self) -> None:
        ending = self._work.reply.ending(self._options.include_usage)
        await self.send(self._last + ending, last=True)

    async def send(self, text: str, last: bool = False) -> None:
        data, transport = text.encode(), self._http.transport
        write = self._response.write_eof if last else self._response.write
        if not (data or last):
            return
        if transport is None or transport.get_write_buffer_size() + len(data) < NEVER_WAITS:
            await write(data)
            return
        async with writing(self._http):
            await write(data)


@contextlib.asynccontextmanager
async def writing(http: web.Request) -> AsyncIterator[None]:
    """Waits for a client to read, slowly if it likes, but not for ever."""
    watch = None
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S) as limit:
            watch = asyncio.create_task(extend(limit, http))
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_TIMEOUT_S:g} s") from None
    finally:
        if watch is not None:
            watch.cancel()


async def extend(limit: asyncio.Timeout, http: web.Request) -> None:
    """Moves the limit whenever the client has read something."""
    before = unread(http)
    while True:
        await asyncio.sleep(WRITE_TIMEOUT_S / LOOKS)
        if limit.expired():
            return
        if (now := unread(http)) != before:
            before = now
            limit.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)


def unread(http: web.Request) -> int:
    """Bytes that the client's machine has not taken yet: those of asyncio, and those of the kernel."""
    transport = http.transport
    if transport is None or transport.is_closing():
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
