"""A message of a conversation: OpenAI's names, and what clients keep beside them and send back."""

from typing import Any, Literal

from pydantic import ConfigDict

from hemiola.runtime.serving.openai.base import Body, Items


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # Anthropic's; prefixes are cached unasked


class FunctionCall(Body):
    name: str
    arguments: str
    parsed_arguments: Any = None  # openai's `parse` adds them
    provider_specific_fields: dict[str, Any] | None = None  # litellm's


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of those who send back what they collected from a stream
    provider_specific_fields: dict[str, Any] | None = None  # litellm's
    extra_content: dict[str, Any] | None = None  # Google's, with signatures of thoughts


class ThoughtBlock(Body):
    """A part of a thought, as Anthropic (`thinking`) or OpenRouter (`text`, `summary`) writes it. What other
    models signed or encrypted is nobody's to read here."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    type: str
    thinking: str | None = None
    text: str | None = None


class Message(Body):
    """`audio` and the like may stand there as null: clients send back the objects that they got."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's and OpenRouter's
    thinking_blocks: Items[ThoughtBlock] | None = None  # litellm's
    reasoning_details: Items[ThoughtBlock] | None = None  # OpenRouter's
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    images: None = None
    annotations: list[Any] | None = None
    parsed: Any = None  # openai's `parse` adds it
    provider_specific_fields: dict[str, Any] | None = None  # litellm's
    cache_control: dict[str, Any] | None = None

    @property
    def thought(self) -> str | None:
        """By the first of its names that is there: clients keep the same text under several."""
        for text in (self.reasoning_content, self.reasoning):
            if text is not None:
                return text
        for blocks in (self.thinking_blocks, self.reasoning_details):
            texts = [block.thinking or block.text or "" for block in blocks or ()]
            if any(texts):
                return "".join(texts)
        return None
