"""An answer as server-sent events, written as fast as its client reads, but not for ever."""

import asyncio
import logging
from functools import partial
from typing import Any

from aiohttp import web

from hemiola.runtime.api import Piece
from hemiola.runtime.errors import Busy, Refused, counted
from hemiola.runtime.serving.openai.errors import api_error
from hemiola.runtime.serving.openai.readers import Readers
from hemiola.runtime.serving.openai.reply import Json
from hemiola.runtime.serving.openai.schema import StreamOptions
from hemiola.runtime.serving.openai.work import Work
from hemiola.runtime.serving.slow_reader import never_waits, writing
from hemiola.runtime.serving.wire import Answers, Pieces

log = logging.getLogger("hemiola.openai")


def too_many(error: Exception, num_asked: int) -> Exception:
    """A batch that the engine never has room for is no matter of coming back later."""
    capacity = error.max_rows + error.max_queue if isinstance(error, Busy) else 0
    if not isinstance(error, Busy) or not 0 < capacity < num_asked:
        return error
    room = f"{counted(error.max_rows, 'row', 'rows')}, max_queue={error.max_queue}"
    message = f"prompts x n is {num_asked}, the engine takes {capacity} at once ({room})"
    return Refused("too_long", "n", message=message, way_out="send fewer")


async def stream(
    http: web.Request, work: Work, answers: Answers, options: StreamOptions, readers: Readers
) -> web.StreamResponse:
    """Events; they begin with the first token, so that what is refused still has its status."""
    await answers.begin()
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, "X-Request-Id": work.reply.id})
    await response.prepare(http)
    events = Events(http, response, work, options, readers)
    try:
        await answers.each(events.take)
        await events.finish()
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # its status has been sent: clients look into the events
        log.warning("%s after its first token: %s", work.reply.id, error)
        await events.send(work.reply.failed(api_error(too_many(error, len(work.asked)))), last=True)
    return response


def num_named(piece: Piece) -> int:
    """Tokens that its events name: with a first piece come the scores of a whole prompt, for an echo."""
    scores = piece.prompt_logprobs or ()
    return len(piece.token_ids) + sum(1 + len(score.top) for score in scores if score is not None)


class Events:
    """An answer as server-sent events: each piece is one write, and the last one the end's, too."""

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        work: Work,
        options: StreamOptions,
        readers: Readers,
    ) -> None:
        self._http, self._response, self._work, self._options = http, response, work, options
        self._readers = readers
        self._turn = asyncio.Lock()  # pieces wait for one that a thread reads
        self._num_open = len(work.choices)
        self._usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        self._last = ""

    async def take(self, pieces: Pieces) -> None:
        async with self._turn:
            text = ""
            for index, piece in pieces:
                self._work.reply.count(index, piece)
                text += await self._readers.run(num_named(piece), partial(self._text, index, piece))
            self._num_open -= sum(piece.finish_reason is not None for _, piece in pieces)
            if self._num_open:
                await self.send(text)
            else:
                self._last = text

    def _text(self, index: int, piece: Piece) -> str:
        """A piece as events."""
        reply, usage = self._work.reply, self._usage
        chunks: list[Json] = self._work.choices[index].chunks(piece)
        if self._options.continuous_usage_stats:
            usage = {"usage": reply.usage()}
        return "".join([reply.event([chunk], usage) for chunk in chunks])

    async def finish(self) -> None:
        ending = self._work.reply.ending(self._options.include_usage)
        await self.send(self._last + ending, last=True)

    async def send(self, text: str, last: bool = False) -> None:
        data, transport = text.encode(), self._http.transport
        write = self._response.write_eof if last else self._response.write
        if not (data or last):
            return
        if never_waits(transport, len(data)):
            await write(data)
            return
        async with writing(transport):
            await write(data)
