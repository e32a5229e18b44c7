"""Every bad body has its status, its code and a message that names it; the next good request works."""

import json
from collections.abc import Callable, Iterator

import pytest
import requests
from kit.scripted_triton import ScriptedTriton, script

from hemiola.runtime.serving.openai.front import Front

TEXT, CHAT = "completions", "chat/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
P, M = {"prompt": "x"}, {"messages": [USER]}
DEEP = "[" * 5000 + "]" * 5000


def says(**changes: object) -> dict:
    return {"messages": [USER | changes]}


def tool(**changes: object) -> dict:
    return M | {"tools": [{"type": "function", "function": TOOL["function"] | changes}]}


# name: (route, what the body has beside the model, status, param, a part of the message)
# More numbers: tests/model_repo/test_numbers.py.
BAD = {
    "no_model": (TEXT, {"model": None} | P, 400, "model", "model is None: it should be a valid string"),
    "unknown_model": (TEXT, {"model": "gpt"} | P, 404, "model", "no model 'gpt', there is tiny, ids, bare"),
    "no_prompt": (TEXT, {}, 400, "prompt", "prompt is missing"),
    "empty_prompt": (TEXT, {"prompt": ""}, 400, "prompt", "a prompt is empty"),
    "empty_ids": (TEXT, {"prompt": []}, 400, "prompt", "a prompt is empty"),
    "one_empty_of_two": (TEXT, {"prompt": ["a", ""]}, 400, "prompt", "a prompt is empty"),
    "number_for_prompt": (TEXT, {"prompt": 5}, 400, "prompt", "give a text, a list of token ids"),
    "float_ids": (TEXT, {"prompt": [1.5]}, 400, "prompt", "give a text, a list of token ids"),
    "boolean_ids": (TEXT, {"prompt": [True]}, 400, "prompt", "give a text, a list of token ids"),
    "huge_id": (TEXT, {"prompt": [5, 2**70]}, 400, None, f"token id {2**70} at position 1"),
    "text_without_tokenizer": (TEXT, {"model": "ids"} | P, 400, None, "model ids has no tokenizer"),
    "unknown_option": (TEXT, P | {"max_tokns": 5}, 400, "max_tokns", "unknown option 'max_tokns'"),
    "max_tokens_of_70_bits": (TEXT, P | {"max_tokens": 2**70}, 400, "max_tokens", "needs more than 64 bits"),
    "temperature_text": (TEXT, P | {"temperature": "hot"}, 400, "temperature", "temperature is 'hot'"),
    "seed_of_65_bits": (TEXT, P | {"seed": 2**64}, 400, "seed", f"seed is {2**64}: it should be less than"),
    "n_0": (TEXT, P | {"n": 0}, 400, "n", "n is 0"),
    "n_129": (TEXT, P | {"n": 129}, 400, "n", "n is 129"),
    "best_of": (TEXT, P | {"best_of": 3}, 400, "best_of", "give n instead"),
    "suffix": (TEXT, P | {"suffix": "x"}, 400, "suffix", "suffix is 'x'"),
    "echo_and_logprobs": (TEXT, P | {"echo": True, "logprobs": 1}, 400, "echo", "are not computed"),
    "logprobs_21": (TEXT, P | {"logprobs": 21}, 400, "logprobs", "logprobs is 21"),
    "logprobs_true": (TEXT, P | {"logprobs": True}, 400, "logprobs", "logprobs is True"),
    "empty_stop": (TEXT, P | {"stop": ""}, 400, "stop", "an empty stop string"),
    "stop_number": (TEXT, P | {"stop": [5]}, 400, "stop", "stop is 5"),
    "1000_stops": (TEXT, P | {"stop": ["x"] * 1000}, 400, "stop", "stop has 1000 texts, the limit is 64"),
    "bias_key": (TEXT, P | {"logit_bias": {"x": 1}}, 400, "logit_bias", "a key that is no token id"),
    "bias_value": (TEXT, P | {"logit_bias": {"5": "x"}}, 400, "logit_bias", "logit_bias is 'x'"),
    "bias_of_one_id_twice": (
        TEXT, P | {"logit_bias": {"01": 5, "1": -5}}, 400, "logit_bias", "two keys for one token id",
    ),
    "bias_list": (TEXT, P | {"logit_bias": [5]}, 400, "logit_bias", "logit_bias is [5]"),
    "min_above_max": (TEXT, P | {"min_tokens": 17}, 400, "min_tokens", "max_tokens is 16"),
    "stream_text": (TEXT, P | {"stream": "yes"}, 400, "stream", "stream is 'yes'"),
    "stream_options_alone": (
        TEXT, P | {"stream_options": {"include_usage": True}}, 400, "stream_options", "set stream to true",
    ),
    "stream_options_unknown": (
        TEXT, P | {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "unknown option",
    ),
    "chat_in_completions": (TEXT, M, 400, "prompt", "prompt is missing"),
    "no_messages": (CHAT, {}, 400, "messages", "messages is missing"),
    "empty_messages": (CHAT, {"messages": []}, 400, "messages", "messages is []: nothing is asked"),
    "messages_text": (CHAT, {"messages": "hi"}, 400, "messages", "messages is 'hi'"),
    "role": (CHAT, says(role="robot"), 400, "messages[0].role", "messages[0].role is 'robot'"),
    "content_number": (CHAT, says(content=5), 400, "messages[0].content", "messages[0].content"),
    "image": (
        CHAT, says(content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400,
        "messages[0].content[0].type", "it should be 'text'",
    ),
    "message_key": (CHAT, says(colour="red"), 400, "messages[0].colour", "unknown option"),
    "call_without_function": (
        CHAT, says(role="assistant", tool_calls=[{"id": "1"}]), 400, "messages[0].tool_calls[0].function",
        "is missing",
    ),
    "call_arguments": (
        CHAT, says(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), 400,
        "messages[0].tool_calls[0]", "arguments is not a JSON object",
    ),
    "call_that_no_template_shows": (
        CHAT,
        {"model": "bare"}
        | says(role="assistant", content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        400, "messages", "messages[0].tool_calls changes nothing",
    ),
    "tool_type": (CHAT, M | {"tools": [{"type": "web"}]}, 400, "tools[0].type", "tools[0].type is 'web'"),
    "tool_name": (CHAT, tool(name="a b"), 400, "tools[0].function.name", "is 'a b': it should match"),
    "tool_parameters": (CHAT, tool(parameters=[]), 400, "tools[0].function.parameters", "an object"),
    "two_of_a_name": (CHAT, M | {"tools": [TOOL, TOOL]}, 400, "tools", "two tools have one name"),
    "choice_without_tools": (CHAT, M | {"tool_choice": "required"}, 400, "tool_choice", "without tools"),
    "choice_of_unknown_tool": (
        CHAT, tool() | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice",
        "tool_choice names 'f', the tools are weather",
    ),
    "choice_text": (CHAT, tool() | {"tool_choice": "maybe"}, 400, "tool_choice", "tool_choice"),
    "top_logprobs_alone": (CHAT, M | {"top_logprobs": 2}, 400, "top_logprobs", "set logprobs to true"),
    "top_logprobs_21": (CHAT, M | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "is 21"),
    "two_limits": (
        CHAT, M | {"max_tokens": 5, "max_completion_tokens": 5}, 400, "max_tokens", "mean the same",
    ),
    "format": (CHAT, M | {"response_format": {"type": "xml"}}, 400, "response_format.type", "is 'xml'"),
    "format_without_schema": (
        CHAT, M | {"response_format": {"type": "json_schema"}}, 400, "response_format",
        "json_schema goes with the type json_schema",
    ),
    "audio": (CHAT, M | {"modalities": ["audio"]}, 400, "modalities[0]", "it should be 'text'"),
    "template_kwargs": (
        CHAT, M | {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, 400, "chat_template_kwargs",
        "take it out",
    ),
    "regex_within_a_thought": (
        CHAT, M | {"structured_outputs": {"regex": "a"}}, 400, "structured_outputs",
        '{"enable_thinking": false}',
    ),
    "regex_and_format": (
        CHAT, M | {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400,
        "structured_outputs", "give one of them",
    ),
    "two_grammars": (
        TEXT, P | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs",
        "regex and choice given",
    ),
    "template_variable": (
        CHAT, M | {"chat_template_kwargs": {"enable_thinkin": False}}, 400, "chat_template_kwargs",
        "holds 'enable_thinkin', which the checkpoint's chat template does not read (it reads"
        " add_generation_prompt, enable_thinking); take it out",
    ),
    "tools_that_no_template_shows": (
        CHAT, tool() | {"model": "bare"}, 400, "tools", "shows no tools to the model; force one",
    ),
    "template_self": (
        CHAT, M | {"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs", "take it out",
    ),
    "store": (CHAT, M | {"store": True}, 400, "store", "store is True"),
    "chat_without_tokenizer": (CHAT, {"model": "ids"} | M, 400, None, "messages are text, model ids has no"),
}  # fmt: skip
# name: (body, status, a part of the message)
RAW = {
    "nothing": (b"", 400, "the body is not JSON"),
    "cut": (b'{"model": "tiny", "prom', 400, "the body is not JSON"),
    "list": (b"[]", 400, "the body is []"),
    "key_twice": (
        b'{"model": "tiny", "prompt": "x", "n": 1, "n": 2}',
        400,
        "'n' stands twice in one object; give it once",
    ),
    "inner_key_twice": (
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        400,
        "'1' stands twice",
    ),
    "not_utf8": (b'{"model": "tiny", "prompt": "a\xff"}', 400, "the body is not JSON"),
    "lone_surrogate": (b'{"model": "tiny", "prompt": "a\\ud800"}', 400, "the body is not JSON"),
    "deep": (b'{"model": "tiny", "prompt": ' + DEEP.encode() + b"}", 400, "the body is not JSON"),
    "nan": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "temperature is nan"),
    "infinity": (b'{"model": "tiny", "prompt": "x", "top_p": Infinity}', 400, "top_p is inf"),
    "too_large": (b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}', 413, "the body is too large"),
}


@pytest.fixture
def post(start: Callable[..., Front], triton: ScriptedTriton) -> Iterator[Callable[..., requests.Response]]:
    """Posts, and afterwards a good request."""
    triton.script = script("fine")
    url = start(max_body=20_000).url
    with requests.Session() as session:
        yield lambda route, body: session.post(f"{url}/{route}", data=body, timeout=60)
        good = session.post(f"{url}/{TEXT}", json={"model": "tiny", "prompt": "x"}, timeout=60)
        assert good.json()["choices"][0]["text"] == "fine"
        assert len(triton.requests) == 1, "no bad request may reach the engine"


def check(answer: requests.Response, status: int, message: str) -> dict:
    assert answer.status_code == status
    (name,) = answer.json()
    error = answer.json()["error"]
    assert (name, set(error)) == ("error", {"message", "type", "param", "code"})
    assert message in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 1000
    return error


@pytest.mark.parametrize("case", BAD)
def test_bad_request_is_answered_by_name(post: Callable[..., requests.Response], case: str) -> None:
    route, given, status, param, message = BAD[case]
    answer = post(route, json.dumps({"model": "tiny"} | given))
    assert check(answer, status, message)["param"] == param


@pytest.mark.parametrize("case", RAW)
def test_bad_body_is_answered_by_name(
    post: Callable[..., requests.Response], start: Callable[..., Front], case: str
) -> None:
    body, status, message = RAW[case]
    if status == 413:
        url = start(max_body=1000).url
        check(requests.post(f"{url}/{TEXT}", data=body, timeout=60), status, message)
    else:
        check(post(TEXT, body), status, message)


def test_other_paths_and_methods_have_the_shape_too(post: object, start: Callable[..., Front]) -> None:
    url = start().url
    check(requests.get(f"{url}/embeddings", timeout=60), 404, "no /v1/embeddings here")
    check(requests.get(f"{url}/completions", timeout=60), 405, "/v1/completions does not take GET")
    check(requests.get(f"{url}/models/gpt", timeout=60), 404, "no model 'gpt'")
    for encoding in ("gzip", "deflate", "br"):
        body, head = json.dumps({"model": "tiny"} | P), {"Content-Encoding": encoding}
        check(
            requests.post(f"{url}/{TEXT}", data=body, headers=head, timeout=60),
            400,
            "the body cannot be read",
        )
    huge = requests.get(f"{url}/models", headers={"X-Flood": "x" * 100_000}, timeout=60)
    assert huge.status_code == 400
