# needs: openai
"""OpenAI's quick start: a streamed chat, and the same by the Responses API."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
messages = [{"role": "user", "content": "Write a Python function add(a, b)."}]
chunks = client.chat.completions.create(model="hemiola", messages=messages, max_tokens=24, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text.strip(), "a stream without text"

with client.responses.stream(model="hemiola", input="Write a function.", max_output_tokens=24) as stream:
    kinds = [event.type for event in stream]
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
print(repr(text[:50]))
