# needs: litellm mcp
"""LiteLLM's quick start for OpenAI-compatible servers: whole, streamed, and a loop with a tool.

For tools it imports `mcp`, which it does not install itself (1.106).
"""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks GitHub for prices first
import litellm

common = {
    "model": "openai/hemiola",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": "none",
    "messages": [{"role": "user", "content": "Write a Python function."}],
    "max_tokens": 24,
}
answer = litellm.completion(**common)
assert answer.choices[0].message.content and answer.usage.completion_tokens
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **common)]
assert "".join(pieces)
second = {"messages": [*common["messages"], answer.choices[0].message.model_dump(), common["messages"][0]]}
assert litellm.completion(**common | second).choices[0].message.content, "what it got is sent back"

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}},
        },
    }
]
called = litellm.completion(tools=tools, tool_choice="required", **common | {"max_tokens": 64})
message = called.choices[0].message
results = [
    {"role": "tool", "tool_call_id": one.id, "name": "f", "content": "14 C"} for one in message.tool_calls
]
block = {"type": "thinking", "thinking": "It may rain.", "signature": "s"}
thought = litellm.Message(
    content=None,
    tool_calls=[call.model_dump() for call in message.tool_calls],
    reasoning_content="It may rain.",
    thinking_blocks=[block],
)
for turn in (message, message.model_dump(), thought, thought.model_dump()):  # what it keeps is sent back
    second = {"messages": [*common["messages"], turn, *results]}
    assert litellm.completion(tools=tools, **common | second).choices[0].finish_reason
print(repr(answer.choices[0].message.content[:50]))
