"""Answers of `/v1/responses`: one object at the end, or typed events as they come."""

import time
import uuid
from collections.abc import Iterator

from hemiola.runtime.api import Piece
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.openai.answer import AnswerPart, Expected, Splitter
from hemiola.runtime.serving.openai.base import Body
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.parts import ENCODER
from hemiola.runtime.serving.openai.reply import Choice, Json
from hemiola.runtime.serving.openai.responses import ResponsesRequest

MAX_REPEATED = 2**21  # characters of a request in its answer: three times in a stream, by the event loop
# Of each kind of part: the item's type and prefix, the type of its content, and the events of its text.
KINDS = {
    "reasoning": ("reasoning", "rs", "reasoning_text", "response.reasoning_text"),
    "content": ("message", "msg", "output_text", "response.output_text"),
    "call": ("function_call", "fc", "", "response.function_call_arguments"),
}


class ResponseItem:
    """A thought, a message or a call, while it grows."""

    def __init__(self, index: int, part: AnswerPart) -> None:
        self.kind, self.call_id = part.kind, part.call_id
        kind, prefix, self._content, self._events = KINDS[part.kind]
        self._texts: list[str] = []
        self._fields: Json = {"id": _new_id(prefix), "type": kind, "status": "in_progress"}
        self._at = {"item_id": self._fields["id"], "output_index": index}
        match self.kind:
            case "call":
                self._fields |= {"call_id": _new_id("call"), "name": part.name}
            case "content":
                self._fields |= {"role": "assistant"}
            case "reasoning":
                self._fields |= {"summary": []}
        if self._content:
            self._at["content_index"] = 0

    def takes(self, part: AnswerPart) -> bool:
        return self.kind == part.kind and (self.kind != "call" or self.call_id == part.call_id)

    def open(self) -> Iterator[Json]:
        index = self._at["output_index"]
        yield {"type": "response.output_item.added", "output_index": index, "item": self.json(empty=True)}
        if self._content:
            yield {"type": "response.content_part.added", **self._at, "part": self._part("")}

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> Iterator[Json]:
        self._texts.append(text)
        if text:
            yield {"type": f"{self._events}.delta", **self._at, "delta": text, **self._logprobs()}

    def close(self, status: str) -> Iterator[Json]:
        self._fields["status"] = status
        name = "text" if self._content else "arguments"
        yield {"type": f"{self._events}.done", **self._at, name: self._text, **self._logprobs()}
        if self._content:
            yield {"type": "response.content_part.done", **self._at, "part": self._part(self._text)}
        index = self._at["output_index"]
        yield {"type": "response.output_item.done", "output_index": index, "item": self.json()}

    def json(self, empty: bool = False) -> Json:
        if not self._content:
            return {**self._fields, "arguments": "" if empty else self._text}
        return {**self._fields, "content": [] if empty else [self._part(self._text)]}

    def _part(self, text: str) -> Json:
        return {
            "type": self._content,
            "text": text,
            **({"annotations": []} if self.kind == "content" else {}),
        }

    def _logprobs(self) -> Json:
        return {"logprobs": []} if self.kind == "content" else {}


class ResponseChoice(Choice):
    """The answer: takes pieces, gives events, and at the end the whole."""

    def __init__(self, prompt_ids: list[int], expected: Expected) -> None:
        super().__init__(0, prompt_ids, None, with_ids=False)
        self._answer, self._thinking = Splitter(expected), expected.thinking
        self.items: list[ResponseItem] = []
        self._kinds: set[str] = set()  # of the items
        self.num_thought_tokens = 0
        self.is_cut = False

    def take(self, piece: Piece) -> None:
        for _ in self.chunks(piece):
            pass

    def chunks(self, piece: Piece) -> list[Json]:
        super().take(piece)
        parts = self._answer.push(piece.text)
        ends = piece.finish_reason is not None
        if ends:
            self.is_cut = piece.finish_reason == "length"
            parts += self._answer.finish(cut=self.is_cut)
        kinds = self._kinds | {part.kind for part in parts}
        if kinds == {"reasoning"} or (self._thinking and not kinds):
            self.num_thought_tokens += len(piece.token_ids)
        made = [event for part in parts for event in self._read(part)]
        if ends and self.items:
            made += self.items[-1].close("incomplete" if self.is_cut else "completed")
        return made

    def _read(self, part: AnswerPart) -> Iterator[Json]:
        if not self.items or not self.items[-1].takes(part):
            if not part.text and part.kind != "call":
                return
            if self.items:
                yield from self.items[-1].close("completed")
            self.items.append(ResponseItem(len(self.items), part))
            self._kinds.add(part.kind)
            yield from self.items[-1].open()
        yield from self.items[-1].add(part.text)

    def whole(self) -> Json:
        return {"output": [item.json() for item in self.items]}


class ResponseReply:
    """What stands around the answer. Refused if that is too much of the request."""

    def __init__(self, model: ServedModel, request: ResponsesRequest, choice: ResponseChoice) -> None:
        self.id = _new_id("resp")
        self._choice = choice
        self._num_events = 0
        extra = request.model_extra or {}
        wanted = request.text.format if request.text else None
        given = wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}
        choice_of = request.tool_choice
        head: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": request.reasoning.model_dump(exclude={"generate_summary"})
            if request.reasoning
            else {"effort": None, "summary": None},
            "store": False,
            "temperature": extra.get("temperature", 1.0),
            "text": {"format": given},
            "tool_choice": choice_of.model_dump() if isinstance(choice_of, Body) else choice_of or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": extra.get("top_p", 1.0),
            "truncation": "disabled",
            "user": request.user,
        }
        self._head = ENCODER.encode(head)[:-1]  # once: a stream says it three times
        if (size := len(self._head) + 1) > MAX_REPEATED:
            message = f"the answer would repeat {size} characters of the request, the limit is {MAX_REPEATED}"
            way_out = "shorten instructions, tools, text, reasoning, metadata or user"
            raise Refused("too_long", message=message, way_out=way_out)

    def count(self, index: int, piece: Piece) -> None:
        """The one answer counts its own tokens."""

    def event(self, choices: list[Json], more: Json) -> str:
        """Events of the answer, behind the two that every stream begins with."""
        first = [] if self._num_events else [self._about("created"), self._about("in_progress")]
        return "".join([*first, *map(self._numbered, choices)])

    def ending(self, include_usage: bool) -> str:
        return self._numbered({"type": f"response.{self._status}"}, self.text())

    def failed(self, error: ApiError) -> str:
        body = {"code": "server_error", "message": str(error)}
        response = self._with({"status": "failed", "error": body, "output": [], "usage": None})
        return self._numbered({"type": "response.failed"}, response)

    def text(self) -> str:
        """The whole answer."""
        details = {"reason": "max_output_tokens"} if self._choice.is_cut else None
        about = {"status": self._status, "error": None, "incomplete_details": details, "usage": self.usage()}
        return self._with(about | self._choice.whole())

    def _with(self, more: Json) -> str:
        """A response object."""
        return f"{self._head},{ENCODER.encode(more)[1:]}"

    def usage(self) -> Json:
        choice = self._choice
        num_input, num_output = len(choice.prompt_ids), choice.num_output_tokens
        cached = choice.metrics.cached_tokens if choice.metrics is not None else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": choice.num_thought_tokens},
            "total_tokens": num_input + num_output,
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.is_cut else "completed"

    def _about(self, event: str) -> str:
        """One of the events that every stream begins with."""
        state = {"status": "in_progress", "error": None, "incomplete_details": None}
        response = self._with({**state, "output": [], "usage": None})
        return self._numbered({"type": f"response.{event}"}, response)

    def _numbered(self, event: Json, response: str = "") -> str:
        """response: the object that it has, if it has one."""
        text = ENCODER.encode({**event, "sequence_number": self._num_events})
        if response:
            text = f'{text[:-1]},"response":{response}}}'
        self._num_events += 1
        return f"event: {event['type']}\ndata: {text}\n\n"


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
