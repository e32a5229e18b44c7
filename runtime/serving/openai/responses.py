"""Bodies of `/v1/responses`, read as the chat that they mean. Nothing is stored: each has its whole input."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.schema import (
    ApiRequest,
    Body,
    ChatRequest,
    Effort,
    Function,
    Items,
    validated,
)

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


class InputReasoning(Body):
    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
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
            raise ApiError(
                400,
                "max_tokens is a chat's; give max_output_tokens",
                param="max_tokens",
                code="invalid_value",
            )
        if self.num_choices > 1 or self.return_token_ids:
            name = "n" if self.num_choices > 1 else "return_token_ids"
            raise ApiError(
                400, f"{name} is not served here; use /v1/chat/completions", param=name, code="invalid_value"
            )
        if not self.input:
            raise ApiError(
                400, "input is empty; give a text or at least one item", param="input", code="invalid_value"
            )
        return self

    def chat(self) -> ChatRequest:
        """The same as a chat."""
        tools = [_tool(tool) for tool in self.tools] if self.tools is not None else None
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return validated(
            ChatRequest,
            {
                **(self.model_extra or {}),
                "model": self.model,
                "stream": self.stream,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "tools": tools,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._format(),
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "chat_template_kwargs": self.chat_template_kwargs,
            },
            ResponsesRequest,
        )

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type != "json_schema":
            return {"type": wanted.type} if wanted else None
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> list[dict[str, Any]]:
        """Reasoning, text and calls that stand together are one message of the assistant."""
        made: list[dict[str, Any]] = []
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*made, {"role": "user", "content": self.input}]
        turn: dict[str, Any] | None = None  # the assistant's, while it goes on
        for item in self.input:
            if _is_said(item):
                if turn is None:
                    made.append(turn := {"role": "assistant", "content": None})
                _add(turn, item)
            else:
                turn = None
                made.append(_given(item))
        return made


def _tool(tool: FlatTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _is_said(item: Item) -> bool:
    """By the assistant."""
    return isinstance(item, InputReasoning | InputCall) or getattr(item, "role", "") == "assistant"


def _add(turn: dict[str, Any], item: Item) -> None:
    match item:
        case InputReasoning():
            text = "".join(part.text for part in item.content or ())
            if text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        case InputMessage():
            turn["content"] = (turn["content"] or "") + _text(item.content)
        case InputCall():
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _given(item: Item) -> dict[str, Any]:
    if isinstance(item, InputResult):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    assert isinstance(item, InputMessage)
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
