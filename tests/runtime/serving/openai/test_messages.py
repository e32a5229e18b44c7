"""What clients send back: an assistant's turn with a thought and a call, as their own objects have it."""

from typing import Any

import openai
import pytest
from kit.scripted_triton import ScriptedTriton, script
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from pydantic import BaseModel

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
OWN = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}  # this front's answer
THOUGHT = "I think of é"
SIGNED = {"type": "thinking", "thinking": THOUGHT, "signature": "s"}
DETAIL = {"type": "reasoning.text", "text": THOUGHT, "format": "unknown", "index": 0, "id": None}


class Answer(BaseModel):
    a: str


# Seen in bodies that these packages sent (openai 2.54 and 3.54, litellm 1.106, langchain-openai 1.7), or as
# their documents and servers have it.
TURNS: dict[str, Any] = {
    "openai's object": ChatCompletionMessage.model_validate(OWN | {"reasoning_content": THOUGHT}),
    "openai's model_dump": ChatCompletionMessage.model_validate(
        OWN | {"reasoning_content": THOUGHT}
    ).model_dump(),
    "openai's parse": ParsedChatCompletionMessage[Answer].model_validate(
        OWN
        | {
            "reasoning_content": THOUGHT,
            "parsed": {"a": "b"},
            "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"a": "b"}}}],
        }
    ).model_dump(),
    "deltas put together": OWN | {"reasoning_content": THOUGHT, "tool_calls": [CALL | {"index": 0}]},
    "litellm": {
        "role": "assistant",
        "tool_calls": [CALL | {"provider_specific_fields": {"thought_signature": "s"}}],
        "reasoning_content": THOUGHT,
        "provider_specific_fields": {"refusal": None, "reasoning_content": THOUGHT},
    },
    "litellm's model_dump": {
        "content": None,
        "role": "assistant",
        "tool_calls": [CALL | {"function": CALL["function"] | {"provider_specific_fields": None}}],
        "function_call": None,
        "images": None,
        "annotations": [],
        "audio": None,
        "reasoning_content": THOUGHT,
        "thinking_blocks": [SIGNED, {"type": "redacted_thinking", "data": "x"}],
    },
    "thinking blocks alone": {"role": "assistant", "tool_calls": [CALL], "thinking_blocks": [SIGNED]},
    "vLLM": {"role": "assistant", "tool_calls": [CALL], "reasoning": THOUGHT, "reasoning_content": None},
    "vLLM, both": {
        "role": "assistant", "tool_calls": [CALL], "reasoning": THOUGHT, "reasoning_content": THOUGHT,
    },
    "OpenRouter": {
        "role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": THOUGHT,
        "reasoning_details": [DETAIL],
    },
    "OpenRouter, details alone": {"role": "assistant", "tool_calls": [CALL], "reasoning_details": [DETAIL]},
    "Google's": {
        "role": "assistant", "reasoning_content": THOUGHT,
        "tool_calls": [CALL | {"extra_content": {"google": {"thought_signature": "s"}}}],
    },
    "cached by Anthropic's rules": {
        "role": "assistant", "reasoning_content": THOUGHT, "tool_calls": [CALL],
        "content": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}],
        "cache_control": {"type": "ephemeral"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_that_is_sent_back_reaches_the_prompt_thought_and_call(
    client: OpenAI, triton: ScriptedTriton, models: dict, name: str
) -> None:
    """Each of these ended an agent's loop at its second turn with a 400, or lost its thought."""
    triton.script = script("done")
    messages: Any = [{"role": "user", "content": "hi"}, TURNS[name], RESULT]
    client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    prompt = models["tiny"].text.decode(triton.inputs()["input_ids"])
    assert f"<think>\n{THOUGHT}</think>" in prompt and prompt.count(THOUGHT) == 1
    assert "<function=f>\n<parameter=a>\nb\n</parameter>" in prompt


def test_what_another_model_encrypted_is_left_out(
    client: OpenAI, triton: ScriptedTriton, models: dict
) -> None:
    triton.script = script("done")
    sealed = [
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "reasoning.encrypted", "data": "secret"},
    ]
    turn = {
        "role": "assistant",
        "content": "a",
        "thinking_blocks": sealed[:1],
        "reasoning_details": sealed[1:],
    }
    messages: Any = [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="tiny", messages=messages)
    prompt = models["tiny"].text.decode(triton.inputs()["input_ids"])
    assert "secret" not in prompt and "<think>" not in prompt.rpartition("go on")[0]


REASONING: dict[str, Any] = {
    "ours": {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
             "content": [{"type": "reasoning_text", "text": THOUGHT}]},
    "langchain's": {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
    "OpenAI's": {"type": "reasoning", "id": "rs_1", "encrypted_content": "x",
                 "summary": [{"type": "summary_text", "text": THOUGHT}]},
}  # fmt: skip


@pytest.mark.parametrize("name", REASONING)
def test_a_thought_among_items_reaches_the_prompt(
    client: OpenAI, triton: ScriptedTriton, models: dict, name: str
) -> None:
    """As a summary, too, which is how langchain sends it back; it was dropped without a word."""
    triton.script = script("done")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "b"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    items: Any = [{"role": "user", "content": "hi"}, REASONING[name], call, result]
    client.responses.create(model="tiny", input=items)
    prompt = models["tiny"].text.decode(triton.inputs()["input_ids"])
    assert f"<think>\n{THOUGHT}</think>" in prompt and prompt.count(THOUGHT) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"images": [{"url": "data:"}]}, "messages[1].images"),
        ({"audio": {"id": "x"}}, "messages[1].audio"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"thinking_blocks": ["x"]}, "messages[1].thinking_blocks[0]"),
        ({"reasoning": 3}, "messages[1].reasoning is 3"),
        ({"thoughts": "x"}, "messages[1].thoughts"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_would_be_lost_is_refused_by_name(client: OpenAI, more: dict, said: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"} | more]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=messages)
    assert said in str(refused.value)
