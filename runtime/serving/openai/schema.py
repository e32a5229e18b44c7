"""Bodies of requests: OpenAI's names, and every name of SamplingParams beside them."""

import json
import math
from typing import Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Amount, Name, Refused, one_line, shown
from hemiola.runtime.fields import MOST_CHARACTERS, refused_by
from hemiola.runtime.serving.ask import read_biases
from hemiola.runtime.serving.json_size import check_size
from hemiola.runtime.serving.openai.base import Body, Items
from hemiola.runtime.serving.openai.message import Message

MAX_N = 128
MAX_STOPS = 64
MAX_LOGPROBS = 20
OWN = {"max_tokens", "logprobs", "prompt_logprobs"}  # of SamplingParams; OpenAI's bodies say them otherwise
PASSED = tuple(name for name in SamplingParams.model_fields if name not in OWN)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's; a chat may fill the context


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: every chunk has the usage so far
    include_obfuscation: bool | None = None  # padding against eavesdroppers; there is none


class ApiRequest(Body):
    """What both kinds share. Names of SamplingParams come beside these, and are checked there."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    return_token_ids: bool | None = None  # as in vLLM: ids of prompt and answer, beside the text
    # labels that change nothing here
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        unknown = [name for name in self.model_extra or {} if name not in PASSED]
        if unknown:
            names = ", ".join((*type(self).model_fields, *PASSED))
            name = unknown[0][:MOST_CHARACTERS]
            message = f"unknown option {name!r}"
            raise Refused("unknown", name, message=message, way_out=f"the options are {names}")
        if self.stream_options is not None and not self.stream:
            message = "stream_options is given without stream"
            raise Refused("conflict", "stream_options", message=message, way_out="set stream to true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_requests(self) -> int:
        """To the engine."""
        return self.num_choices

    def params(
        self,
        max_tokens: int,
        logprobs: int | None,
        structured: dict[str, Any] | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[SamplingParams]:
        """One for each of n choices."""
        given: dict[str, Any] = {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }
        given = {"temperature": 1.0, **given, "max_tokens": max_tokens, "logprobs": logprobs}
        given["prompt_logprobs"] = prompt_logprobs
        if structured is not None:
            given["structured_outputs"] = structured
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = _biases(given["logit_bias"])
        _check_stops(given.get("stop"))
        return SamplingParams(**given).each_of(self.num_choices)


def _biases(given: dict[str, Any]) -> dict[int, Any]:
    try:
        return read_biases(given)
    except Refused:
        raise
    except ValueError as error:
        message = f"logit_bias has a key that is no token id ({error})"
        raise Refused(
            "wrong_type", "logit_bias", message=message, way_out="give {'token id': bias}"
        ) from None


def _check_stops(stop: object) -> None:
    """Each costs time at each token."""
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        size = Amount(len(stop), "texts")
        raise Refused("too_long", "stop", size, f"the limit is {MAX_STOPS}", "give fewer")


Prompts = tuple[str | list[int], ...]


class CompletionRequest(ApiRequest):
    store: Literal[False] | None = None
    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # as in vLLM
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_prompts(cls, value: object) -> object:
        """A text, token ids, or a list of either."""
        prompts = value if isinstance(value, list) and value and not _all(int, value) else [value]
        if not all(isinstance(one, str) or (isinstance(one, list) and _all(int, one)) for one in prompts):
            way_out = "give a text, a list of token ids, or a list of texts or of lists of token ids"
            raise Refused("wrong_type", "prompt", value, way_out=way_out)
        if not all(prompts):
            limit = "but a prompt is empty"
            raise Refused("out_of_range", "prompt", value, limit, "give at least one token")
        return tuple(prompts)

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            limit = "but nothing is ranked here"
            raise Refused("unsupported", "best_of", self.best_of, limit, "give n instead")
        _check_scored(self.prompt_logprobs, self.stream)
        if self.echo and self.logprobs is not None and self.stream and self.num_choices > 1:
            message = f"n is {self.num_choices} in a stream that echoes logprobs of its prompt"
            raise Refused("conflict", "n", message=message, way_out="leave n or stream out")
        return self

    @property
    def num_echoed(self) -> int | None:
        """Best tokens to name for each of the prompt's, where those have log-probabilities in the echo."""
        return self.logprobs if self.echo else None

    @property
    def num_requests(self) -> int:
        return len(self.prompt) * self.num_choices


def _check_scored(prompt_logprobs: int | None, stream: bool | None) -> None:
    if prompt_logprobs is not None and stream:
        message = "prompt_logprobs are no part of a stream's chunks"
        raise Refused("conflict", "prompt_logprobs", message=message, way_out="leave one of the two out")


def _all(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


class Function(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class Named(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: Named


class JsonSchema(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "json_schema goes with the type json_schema, and only with it"
            raise Refused("conflict", "json_schema", message=message)
        return self


class ChatRequest(ApiRequest):
    store: Literal[False] | None = None
    messages: Items[Message]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # as in vLLM
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Items[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None  # for templates that can be asked for it

    @field_validator("messages")
    @classmethod
    def _not_empty(cls, messages: list[Message]) -> list[Message]:
        if not messages:
            raise Refused("out_of_range", "messages", [], way_out="give at least one message")
        return messages

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            known = one_line(", ".join(names) or "none")
            message = (Name("tool_choice"), f" names {shown(choice.function.name)}, the tools are {known}")
            raise Refused("unknown", "tool_choice", message=message)
        if choice not in (None, "none", "auto") and not names:
            message = (Name("tool_choice"), f" is {shown(choice)} without ", Name("tools"))
            raise Refused("conflict", "tool_choice", message=message, way_out=("give ", Name("tools")))
        if len(set(names)) < len(names):
            raise Refused("conflict", "tools", message="two tools have one name", way_out="give each its own")
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs is given without logprobs"
            raise Refused("conflict", "top_logprobs", message=message, way_out="set logprobs to true")
        _check_scored(self.prompt_logprobs, self.stream)
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "max_tokens and max_completion_tokens mean the same"
            raise Refused("conflict", "max_tokens", message=message, way_out="give one")
        return self

    def names(self) -> dict[str, str]:
        max_tokens_name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            "prompt": "messages",
            "max_tokens": max_tokens_name,
            "logprobs": "top_logprobs",
            "structured_outputs": self.grammar,
        }

    @property
    def grammar(self) -> str:
        """What asks for a grammar, if something does."""
        if (self.model_extra or {}).get("structured_outputs") is not None:
            return "structured_outputs"
        return "tools" if self.forced else "response_format"

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced(self) -> bool:
        """The answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)


Kind = TypeVar("Kind", bound=Body)


def parse(kind: type[Kind], body: bytes | bytearray) -> Kind:
    check_size("the body", body)
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error, body, list(kind.model_fields)) from None
    json.loads(
        body,
        object_pairs_hook=_check_keys,
        parse_int=str,  # of any length
        parse_float=_check_float,
        parse_constant=_check_float,
    )
    return request


def _check_float(text: str) -> None:
    """Of a value that nobody looks into, and that an answer or a prompt repeats: it would be no JSON."""
    if not math.isfinite(float(text)):
        message = f"the body holds the number {text[:80]}, which no JSON can say"
        raise Refused("malformed", message=message, way_out="give a finite number, or null")


def _refused(error: ValidationError, body: bytes | bytearray, names: list[str]) -> Refused:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        message = f"the body is not JSON ({first.get('ctx', {}).get('error')})"
        return Refused("malformed", message=message, way_out="send a JSON object")
    return refused_by(error, json.loads(body, parse_int=str), names)


def as_chat(values: dict[str, Any]) -> "ChatRequest":
    """The chat that another body means."""
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        raise refused_by(error, values, list(ChatRequest.model_fields)) from None


def _check_keys(pairs: list[tuple[str, object]]) -> None:
    """Pydantic would keep the last of two."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            message = f"{name[:80]!r} stands twice in one object"
            raise Refused("conflict", name[:80], message=message, way_out="give it once")
        seen.add(name)
