# needs: openai
"""OpenAI's function calling guide: offer a tool, take a call, send its result back."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "maxLength": 20}},
                "required": ["location"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
messages = [{"role": "user", "content": "What is the weather like in Paris today?"}]
common = {"model": "hemiola", "tools": tools, "max_tokens": 64}
free = client.chat.completions.create(messages=messages, **common)  # tool_choice auto
assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")

forced = client.chat.completions.create(messages=messages, tool_choice="required", **common)
message = forced.choices[0].message
messages.append(message)
for call in message.tool_calls:
    json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 C"})
final = client.chat.completions.create(messages=messages, **common)
assert final.choices[0].message.role == "assistant"

thought = type(message)(role="assistant", tool_calls=[call], reasoning_content="It may rain.")
result = {"role": "tool", "tool_call_id": call.id, "content": "14 C"}
for turn in (thought, thought.model_dump()):  # as a thinking model's turn goes back
    again = client.chat.completions.create(messages=[messages[0], turn, result], **common)
    assert again.choices[0].finish_reason
print(call.function.name, call.function.arguments)
