"""Bodies of `/v1/responses`, read as the chat that they mean. Nothing is stored: each has its whole input."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.openai.base import Body, Items
from hemiola.runtime.serving.openai.schema import (
    ApiRequest,
    ChatRequest,
    Effort,
    Function,
    as_chat,
)

NAMES = {  # path in a chat -> path in a body of this kind
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "reasoning.effort",
}
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """Clients send back what they got, annotations included."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[InputText]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class InputReasoning(Body):
    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[SummaryText] | None = None  # langchain sends the thought itself back as one
    encrypted_content: str | None = None  # of another model: nobody's to read here
    id: str | None = None
    status: Status | None = None


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class InputResult(Body):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
    id: str | None = None
    status: Status | None = None


Item = Annotated[InputMessage | InputReasoning | InputCall | InputResult, Field(discriminator="type")]


class FlatTool(Function):
    type: Literal["function"]


class FlatChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: str | None = None  # no summary is made: the thought itself is the answer's
    generate_summary: str | None = None


class ResponsesRequest(ApiRequest):
    input: str | Items[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Items[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None  # nothing is: the answer says false
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    include: Items[Literal["reasoning.encrypted_content"]] | None = None  # thoughts are not encrypted
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _typed(cls, value: object) -> object:
        """A message may leave its type out."""
        if not isinstance(value, list):
            return value
        return [
            {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
            for item in value
        ]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.max_tokens is not None:
            message = "max_tokens is a chat's"
            raise Refused("unknown", "max_tokens", message=message, way_out="give max_output_tokens")
        if self.num_choices > 1 or self.return_token_ids:
            name = "n" if self.num_choices > 1 else "return_token_ids"
            message = f"{name} is not served here"
            raise Refused("unsupported", name, message=message, way_out="use /v1/chat/completions")
        if not self.input:
            way_out = "give a text or at least one item"
            raise Refused("out_of_range", "input", message="input is empty", way_out=way_out)
        return self

    def chat(self) -> ChatRequest:
        """The same as a chat."""
        tools = [_tool(tool) for tool in self.tools] if self.tools is not None else None
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return as_chat(
            {
                **(self.model_extra or {}),
                "model": self.model,
                "stream": self.stream,
                "messages": self.as_messages().messages,
                "max_completion_tokens": self.max_output_tokens,
                "tools": tools,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._format(),
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type != "json_schema":
            return {"type": wanted.type} if wanted else None
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}

    def as_messages(self) -> "Messages":
        made = Messages()
        if self.instructions:
            made.give({"role": "system", "content": self.instructions}, "instructions", "instructions")
        if isinstance(self.input, str):
            made.give({"role": "user", "content": self.input}, "input", "input")
        else:
            for i, item in enumerate(self.input):
                made.add(item, f"input[{i}]")
            made.end_turn()
        return made

    def names(self) -> dict[str, str]:
        grammar = "tools" if self.tool_choice not in (None, "none", "auto") else "text.format"
        if (self.model_extra or {}).get("structured_outputs") is not None:
            grammar = "structured_outputs"
        tools = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(self.tools or ()))}
        return NAMES | {"structured_outputs": grammar} | tools | self.as_messages().places


class Messages:
    """The messages of a chat, and where each part of them stands in the input."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}  # by path in a chat
        self._turn: dict[str, Any] | None = None  # the assistant's, while it goes on
        self._said: dict[str, list[str]] = {}  # in it, by the message's keys

    def give(self, message: dict[str, Any], place: str, content: str) -> None:
        path = f"messages[{len(self.messages)}]"
        self.places |= {path: place, f"{path}.content": content}
        self.messages.append(message)

    def add(self, item: Item, place: str) -> None:
        """Reasoning, text and calls that stand together are one message of the assistant."""
        content = f"{place}.content"
        if not _is_said(item):
            self.end_turn()
            self.give(_given(item), place, f"{place}.output" if isinstance(item, InputResult) else content)
            return
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.give(self._turn, place, content)
        path = f"messages[{len(self.messages) - 1}]"
        match item:
            case InputReasoning():
                text = "".join(part.text for part in item.content or item.summary or ())
                if text:
                    self._said.setdefault("reasoning_content", []).append(text)
                    self.places[f"{path}.reasoning_content"] = content
            case InputMessage():
                self._said.setdefault("content", []).append(_text(item.content))
                self.places[f"{path}.content"] = content
            case InputCall():
                calls = self._turn.setdefault("tool_calls", [])
                call = f"{path}.tool_calls[{len(calls)}]"
                self.places.setdefault(f"{path}.tool_calls", place)
                self.places |= {call: place, f"{call}.function": place}
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "function": function})

    def end_turn(self) -> None:
        """Of the assistant, if it has one."""
        if self._turn is not None:
            self._turn |= {key: "".join(texts) for key, texts in self._said.items()}
        self._turn, self._said = None, {}


def _tool(tool: FlatTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _is_said(item: Item) -> bool:
    """By the assistant."""
    return isinstance(item, InputReasoning | InputCall) or getattr(item, "role", "") == "assistant"


def _given(item: Item) -> dict[str, Any]:
    if isinstance(item, InputResult):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    assert isinstance(item, InputMessage)
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
