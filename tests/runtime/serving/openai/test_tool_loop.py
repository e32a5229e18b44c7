"""Agents' loops with the bundled checkpoints, served: tools are offered and called, results are sent back."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.served import Served
from openai import OpenAI

pytestmark = pytest.mark.server

MODELS = ("qwen3.5-code", "nemotron-h-code")
USER = {"role": "user", "content": "What is the weather like in Paris today?"}
FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Kyōto"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def client(bundled: Callable[[str], Path]) -> Iterator[OpenAI]:
    engines = [f"--engine-dir={bundled(name)}" for name in MODELS]
    names = [f"--model-name={name}" for name in MODELS]
    with (
        Served(*engines, *names, "--openai-port=0") as served,
        OpenAI(base_url=served.openai_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert found.keys() == {"city", "days"} and found["city"] in ("Paris", "Kyōto") and found["days"] <= 9


@pytest.mark.parametrize("name", MODELS)
def test_a_chat_calls_a_tool_and_reads_its_result(client: OpenAI, name: str) -> None:
    asked = {"model": name, "tools": [TOOL], "max_tokens": 90, "temperature": 0}
    offered = client.chat.completions.create(messages=[USER], **asked)  # tool_choice auto
    forced = client.chat.completions.create(
        messages=[USER], tool_choice="required", parallel_tool_calls=False, **asked
    )
    assert forced.usage.prompt_tokens == offered.usage.prompt_tokens
    assert forced.choices[0].finish_reason == "tool_calls"
    message = forced.choices[0].message
    (call,) = message.tool_calls
    check(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "14 C"}
    after = client.chat.completions.create(messages=[USER, message, result], **asked)
    assert after.usage.prompt_tokens > offered.usage.prompt_tokens + 10  # the call and its result are in it
    assert after.usage.prompt_tokens_details.cached_tokens > 0


def test_a_response_calls_a_tool_and_reads_its_result(client: OpenAI) -> None:
    asked = {"model": MODELS[0], "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 90}
    forced = client.responses.create(input=[USER], tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = forced.output
    check(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "14 C"}
    after = client.responses.create(input=[USER, call, result], **asked)
    assert after.usage.input_tokens > forced.usage.input_tokens + 10
