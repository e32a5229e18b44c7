# needs: litellm
"""LiteLLM's quick start for OpenAI-compatible servers: whole and streamed."""

import os

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
print(repr(answer.choices[0].message.content[:50]))
