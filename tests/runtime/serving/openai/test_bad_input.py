"""Every bad body has its status, its code and a message that names it; the next good request works."""

import gzip
import json
import socket
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


# name: (route, what the body has beside the model, param, a part of the message)
# More numbers: tests/model_repo/test_numbers.py.
BAD = {
    "no_model": (TEXT, {"model": None} | P, "model", "model is None; give a text"),
    "no_prompt": (TEXT, {}, "prompt", "prompt is missing"),
    "empty_prompt": (TEXT, {"prompt": ""}, "prompt", "a prompt is empty"),
    "empty_ids": (TEXT, {"prompt": []}, "prompt", "a prompt is empty"),
    "one_empty_of_two": (TEXT, {"prompt": ["a", ""]}, "prompt", "a prompt is empty"),
    "number_for_prompt": (TEXT, {"prompt": 5}, "prompt", "give a text, a list of token ids"),
    "float_ids": (TEXT, {"prompt": [1.5]}, "prompt", "give a text, a list of token ids"),
    "boolean_ids": (TEXT, {"prompt": [True]}, "prompt", "give a text, a list of token ids"),
    "huge_id": (TEXT, {"prompt": [5, 2**70]}, "prompt", f"token id {2**70} at position 1"),
    "echo_of_what_is_no_id": (TEXT, {"prompt": [5, -1], "echo": True}, "prompt", "token id -1 at position 1"),
    "echo_of_a_huge_id": (
        TEXT, {"prompt": ["a", [2**40]], "echo": True}, "prompt", f"token id {2**40} at position 0",
    ),
    "text_without_tokenizer": (TEXT, {"model": "ids"} | P, "prompt", "model ids has no tokenizer"),
    "unknown_option": (TEXT, P | {"max_tokns": 5}, "max_tokns", "unknown option 'max_tokns'"),
    "max_tokens_of_70_bits": (TEXT, P | {"max_tokens": 2**70}, "max_tokens", "give at most 2147483647"),
    "temperature_text": (TEXT, P | {"temperature": "hot"}, "temperature", "temperature is 'hot'"),
    "seed_of_65_bits": (TEXT, P | {"seed": 2**64}, "seed", f"seed is {2**64}; give less than"),
    "n_0": (TEXT, P | {"n": 0}, "n", "n is 0"),
    "n_129": (TEXT, P | {"n": 129}, "n", "n is 129"),
    "best_of": (TEXT, P | {"best_of": 3}, "best_of", "give n instead"),
    "suffix": (TEXT, P | {"suffix": "x"}, "suffix", "suffix is 'x'"),
    "echoes_with_logprobs_in_a_stream": (
        TEXT, P | {"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n", "leave n or stream out",
    ),
    "logprobs_21": (TEXT, P | {"logprobs": 21}, "logprobs", "logprobs is 21"),
    "logprobs_true": (TEXT, P | {"logprobs": True}, "logprobs", "logprobs is True"),
    "empty_stop": (TEXT, P | {"stop": ""}, "stop", "an empty stop string"),
    "stop_number": (TEXT, P | {"stop": [5]}, "stop[0]", "stop[0] is 5; give a text"),
    "1000_stops": (TEXT, P | {"stop": ["x"] * 1000}, "stop", "stop has 1000 texts, the limit is 64"),
    "bias_key": (TEXT, P | {"logit_bias": {"x": 1}}, "logit_bias", "a key that is no token id"),
    "bias_key_that_python_takes": (TEXT, P | {"logit_bias": {"1_0": 1}}, "logit_bias", "no token id ('1_0')"),
    "bias_value": (TEXT, P | {"logit_bias": {"5": "x"}}, "logit_bias[5]", "logit_bias[5] is 'x'"),
    "bias_of_one_id_twice": (
        TEXT, P | {"logit_bias": {"01": 5, "1": -5}}, "logit_bias", "two keys for token id 1",
    ),
    "bias_list": (TEXT, P | {"logit_bias": [5]}, "logit_bias", "logit_bias is [5]"),
    "min_above_max": (TEXT, P | {"min_tokens": 17}, "min_tokens", "max_tokens is 16"),
    "stream_text": (TEXT, P | {"stream": "yes"}, "stream", "stream is 'yes'"),
    "stream_options_alone": (
        TEXT, P | {"stream_options": {"include_usage": True}}, "stream_options", "set stream to true",
    ),
    "stream_options_unknown": (
        TEXT, P | {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown option",
    ),
    "chat_in_completions": (TEXT, M, "prompt", "prompt is missing"),
    "no_messages": (CHAT, {}, "messages", "messages is missing"),
    "empty_messages": (CHAT, {"messages": []}, "messages", "messages is []; give at least one message"),
    "messages_text": (CHAT, {"messages": "hi"}, "messages", "messages is 'hi'"),
    "role": (CHAT, says(role="robot"), "messages[0].role", "messages[0].role is 'robot'"),
    "content_number": (CHAT, says(content=5), "messages[0].content", "messages[0].content"),
    "image": (
        CHAT, says(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type", "give 'text'",
    ),
    "message_key": (CHAT, says(colour="red"), "messages[0].colour", "unknown option"),
    "call_without_function": (
        CHAT, says(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function",
        "is missing",
    ),
    "call_arguments": (
        CHAT, says(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "messages[0].tool_calls[0].function.arguments", "arguments is not a JSON object",
    ),
    "call_arguments_twice": (
        CHAT,
        says(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]),
        "messages[0].tool_calls[0].function.arguments", "the key 'a' stands twice in one object",
    ),
    "call_that_no_template_shows": (
        CHAT,
        {"model": "bare"}
        | says(role="assistant", content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls", "messages[0].tool_calls changes nothing",
    ),
    "tool_type": (CHAT, M | {"tools": [{"type": "web"}]}, "tools[0].type", "tools[0].type is 'web'"),
    "tool_name": (CHAT, tool(name="a b"), "tools[0].function.name", "is 'a b'; give a text that ^[A-"),
    "tool_parameters": (CHAT, tool(parameters=[]), "tools[0].function.parameters", "an object"),
    "two_of_a_name": (CHAT, M | {"tools": [TOOL, TOOL]}, "tools", "two tools have one name"),
    "choice_without_tools": (CHAT, M | {"tool_choice": "required"}, "tool_choice", "without tools"),
    "choice_of_unknown_tool": (
        CHAT, tool() | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
        "tool_choice names 'f', the tools are weather",
    ),
    "choice_text": (CHAT, tool() | {"tool_choice": "maybe"}, "tool_choice", "tool_choice"),
    "top_logprobs_alone": (CHAT, M | {"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    "top_logprobs_21": (CHAT, M | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21"),
    "two_limits": (CHAT, M | {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "mean the same"),
    "format": (CHAT, M | {"response_format": {"type": "xml"}}, "response_format.type", "is 'xml'"),
    "format_without_schema": (
        CHAT, M | {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
        "json_schema goes with the type json_schema",
    ),
    "audio": (CHAT, M | {"modalities": ["audio"]}, "modalities[0]", "give 'text'"),
    "template_kwargs": (
        CHAT, M | {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs",
        "take it out",
    ),
    "regex_within_a_thought": (
        CHAT, M | {"structured_outputs": {"regex": "a"}}, "structured_outputs",
        '{"enable_thinking": false}',
    ),
    "regex_and_format": (
        CHAT, M | {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs", "give one of them",
    ),
    "two_grammars": (
        TEXT, P | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs",
        "regex and choice given",
    ),
    "template_variable": (
        CHAT, M | {"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs",
        "holds 'enable_thinkin', which the checkpoint's chat template does not read (it reads"
        " add_generation_prompt, enable_thinking); take it out",
    ),
    "tools_that_no_template_shows": (
        CHAT, tool() | {"model": "bare"}, "tools", "shows no tools to the model; force one",
    ),
    "template_self": (CHAT, M | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "take it out"),
    "store": (CHAT, M | {"store": True}, "store", "store is True"),
    "chat_without_tokenizer": (CHAT, {"model": "ids"} | M, "messages", "is text, but model ids has no"),
}  # fmt: skip
# name: (body, a part of the message)
RAW = {
    "nothing": (b"", "the body is not JSON"),
    "cut": (b'{"model": "tiny", "prom', "the body is not JSON"),
    "list": (b"[]", "the body is []"),
    "key_twice": (
        b'{"model": "tiny", "prompt": "x", "n": 1, "n": 2}',
        "'n' stands twice in one object; give it once",
    ),
    "inner_key_twice": (
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        "'1' stands twice",
    ),
    "not_utf8": (b'{"model": "tiny", "prompt": "a\xff"}', "the body is not JSON"),
    "lone_surrogate": (b'{"model": "tiny", "prompt": "a\\ud800"}', "the body is not JSON"),
    "deep": (b'{"model": "tiny", "prompt": ' + DEEP.encode() + b"}", "the body is not JSON"),
    "nan": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "the number NaN"),
    "infinity": (b'{"model": "tiny", "prompt": "x", "top_p": Infinity}', "the number Infinity"),
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
    route, given, param, message = BAD[case]
    answer = post(route, json.dumps({"model": "tiny"} | given))
    assert check(answer, 400, message)["param"] == param


@pytest.mark.parametrize("case", RAW)
def test_bad_body_is_answered_by_name(post: Callable[..., requests.Response], case: str) -> None:
    body, message = RAW[case]
    check(post(TEXT, body), 400, message)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1E+999"])
@pytest.mark.parametrize("route", [CHAT, "responses"])
def test_a_number_that_no_json_has_is_written_into_prompts_and_answers(
    post: Callable[..., requests.Response], route: str, number: str
) -> None:
    """Behind `parameters` nobody looks: the answer of the responses route was no JSON."""
    body = {"model": "tiny", "max_tokens": 5} | tool(parameters={"default": "HERE"})
    if route == "responses":
        flat = {"type": "function"} | body["tools"][0]["function"]
        body = {"model": "tiny", "input": "hi", "tools": [flat]}
    text = json.dumps(body).replace('"HERE"', number)
    check(post(route, text), 400, f"the body holds the number {number}, which no JSON can say")


def test_a_body_that_is_too_large_is_answered_by_name(post: Callable[..., requests.Response]) -> None:
    check(post(TEXT, json.dumps({"model": "tiny", "prompt": "x" * 20_000})), 413, "the body is too large")


LONG = "\u0007" * 3000
MANY = [TOOL | {"function": {"name": f"{i:064}"}} for i in range(100)]
LONG_ONES = {
    "model": (TEXT, P | {"model": LONG}),
    "option": (TEXT, P | {LONG: 1}),
    "tool_choice": (
        CHAT,
        M | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}},
    ),
    "alone": (CHAT, M | {"tool_choice": {"type": "function", "function": {"name": LONG}}}),
    "tools": (CHAT, M | {"tools": MANY, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
    "kwarg": (CHAT, M | {"chat_template_kwargs": {LONG: 1}}),
    "role": (CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
    "bias": (TEXT, P | {"logit_bias": {LONG: 1}}),
    "metadata": (TEXT, P | {"metadata": {LONG: 5}}),
}


@pytest.mark.parametrize("case", LONG_ONES)
def test_an_error_repeats_all_of_a_long_value(post: Callable[..., requests.Response], case: str) -> None:
    route, given = LONG_ONES[case]
    answer = post(route, json.dumps({"model": "tiny"} | given))
    assert answer.status_code in (400, 404)
    assert len(answer.json()["error"]["message"]) < 2000


def test_a_body_whose_length_is_beyond_the_limit_is_waited_for(start: Callable[..., Front]) -> None:
    running = start(max_body=10_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9223372036854775807\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=50) as connection:  # it would be 60 s
        connection.sendall(head)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_other_paths_and_methods_have_the_shape_too(post: object, start: Callable[..., Front]) -> None:
    url = start().url
    check(requests.get(f"{url}/embeddings", timeout=60), 404, "no /v1/embeddings here")
    check(requests.get(f"{url}/completions", timeout=60), 405, "/v1/completions does not take GET")
    check(requests.get(f"{url}/models/gpt", timeout=60), 404, "no model 'gpt'")
    unknown = requests.post(f"{url}/{TEXT}", json={"model": "gpt"} | P, timeout=60)
    assert check(unknown, 404, "no model 'gpt', there is tiny, ids, bare")["param"] == "model"
    body = json.dumps({"model": "tiny"} | P).encode()
    packed = gzip.compress(body)
    for broken in (body, packed[:-9], packed + b"x", packed[:20] + b"xx" + packed[22:], b"\x1f\x8b"):
        head = {"Content-Encoding": "gzip"}
        answer = requests.post(f"{url}/{TEXT}", data=broken, headers=head, timeout=60)
        check(answer, 400, "the body cannot be read")
    huge = requests.get(f"{url}/models", headers={"X-Flood": "x" * 100_000}, timeout=60)
    assert huge.status_code == 400


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "compress", "x-gzip", "gzip, gzip", "nonsense"])
@pytest.mark.parametrize("route", [TEXT, CHAT, "responses", "../tokenize"])
def test_a_body_in_a_coding_that_nobody_reads_is_read_as_plain_text(
    start: Callable[..., Front], triton: ScriptedTriton, coding: str, route: str
) -> None:
    head = {"Content-Encoding": coding}
    body = json.dumps({"model": "tiny"} | P)
    answer = requests.post(f"{start().url}/{route}", data=body, headers=head, timeout=60)
    check(answer, 415, f"the body is sent with Content-Encoding {coding}; send it plain, or gzip")
    assert answer.headers["Accept-Encoding"] == "gzip, identity"
    assert not triton.requests


def test_a_gzip_body_of_several_members_or_beyond_the_limit_is_cut(
    start: Callable[..., Front], triton: ScriptedTriton
) -> None:
    triton.script = script("ok")
    url = f"{start(max_body=3 * 2**20).url}/{TEXT}"
    head = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    body = json.dumps({"model": "tiny"} | P).encode().ljust(2 * 2**20)  # as much as 8 pieces
    for packed in (gzip.compress(body), gzip.compress(body[:9]) + gzip.compress(body[9:])):
        assert requests.post(url, data=packed, headers=head, timeout=60).status_code == 200
    bomb = gzip.compress(bytes(20 * 2**20), 1)
    check(requests.post(url, data=bomb, headers=head, timeout=60), 413, "more than 3145728 bytes")
