"""Every bad request is answered by name, beside a stream that must not notice."""

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import requests
from kit.triton_calls import events, infer_tensors, joined, post

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server

pytestmark = pytest.mark.server

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def guided(**asked: object) -> dict:
    return {"text_input": "a", "structured_outputs": json.dumps(asked)}


# Beside numbers (test_numbers.py) and all that grammars say (tests/runtime/choose/test_grammar.py).
BAD = {
    "neither": ({"max_tokens": 2}, "a request has either text_input or input_ids, this one has neither"),
    "both": ({"text_input": "a", "input_ids": [5]}, "this one has both"),
    "unknown_key": ({"text_input": "a", "max_tokns": 2}, "unknown key 'max_tokns'; the keys are text_input"),
    "prompt_too_long": ({"input_ids": [5] * 1100}, "prompt is 1100 tokens, max_len=1024"),
    "empty_text": ({"text_input": ""}, "prompt is empty"),
    "empty_ids": ({"input_ids": []}, "prompt is empty"),
    "bad_json": ({"text_input": "a", "logit_bias": "5"}, "logit_bias is 5; "),
    "no_json": ({"text_input": "a", "bad_words_ids": "x"}, "give a text that is JSON, such as [[5, 6]]"),
    "chat_of_ids": ({"input_ids": [5], "chat": True}, "chat needs text_input, this request has input_ids"),
    "timeout": ({"text_input": "a", "timeout": -5}, "timeout is -5; give a whole number of 0 to"),
    "timeout_text": ({"text_input": "a", "timeout": "5 s"}, "timeout is '5 s'; give a whole number"),
    "n_0": ({"text_input": "a", "n": 0}, "n is 0; give a whole number of 1 to 64"),
    "n_65": ({"text_input": "a", "n": 65}, "n is 65; give a whole number of 1 to 64"),
    "n_streams": ({"text_input": "a", "n": 2, "stream": True}, "n is 2 in a stream, which has one answer"),
    "twice": (
        {"text_input": "a", "stop": "x", "stop_words": "y"},
        "stop is given twice, as a tensor or a request parameter, perhaps by its other name; give it once",
    ),
    "beams": ({"text_input": "a", "beam_width": 4}, "beam_width is 4, only 1 is served; leave it out"),
    "echo_of_ids": (
        {"input_ids": [5], "exclude_input_in_output": False},
        "this request has no text_input to repeat",
    ),
    "messages_and_text": ({"text_input": "a", "messages": "[]"}, "a request with messages has no text_input"),
    "messages_no_json": ({"messages": "hello"}, "messages is 'hello'; give a text that is JSON, such as [{"),
    "messages_none": ({"messages": "[]"}, "messages is []; give a JSON list"),
    "messages_object": ({"messages": "{}"}, "messages is {}; give a JSON list"),
    "messages_strings": ({"messages": '["hello"]'}, "messages must have a role and a content each"),
    "messages_no_role": ({"messages": '[{"content": "x"}]'}, "messages must have a role and a content each"),
    "deep": ({"text_input": "a", "bad_words_ids": "[" * 5000}, "give a text that is JSON"),
    "stops_many": (
        {"text_input": "a", "stop": ["x"] * 5000},
        "stop has 5000 entries, at most 1024 are served",
    ),
    "regex": ({"text_input": "a", "structured_outputs": '{"regex": "["}'}, "unclosed character class"),
    "deep_regex": (guided(regex="(" * 3000 + ")" * 3000), "structured_outputs: invalid regex"),
    "deep_schema": (guided(json='{"items":' * 200 + "{}" + "}" * 200), "recursion limit exceeded"),
    "deep_grammar": (guided(grammar=f"root ::= {'(' * 2000}'a'{')' * 2000}"), "nested too deeply"),
    "two": (
        {"text_input": "a", "structured_outputs": '{"regex": "a", "choice": ["a"]}'},
        "exactly one of json",
    ),
    "too_short": (
        {"text_input": "a", "structured_outputs": '{"choice": [""]}', "min_tokens": 2},
        "min_tokens and bad words leave no token that the grammar allows",
    ),
    "logprobs": ({"text_input": "a", "logprobs": 21}, "logprobs is 21"),
    "stop_id": ({"text_input": "a", "stop_token_ids": [320]}, "stop_token_ids holds 320"),
    "cancel_and_more": (
        {"text_input": "a", "cancel": "x"},
        "a request with cancel has no other key, this one has text_input",
    ),
}
BAD_TYPES = {
    "text_for_number": {"text_input": "a", "max_tokens": "2"},
    "number_for_text": {"text_input": 5},
    "number_for_flag": {"text_input": "a", "stream": 1},
    "two_prompts": {"text_input": ["a", "b"]},
    "lone_surrogate": {"text_input": "a\ud800"},
    "not_utf8": b'{"text_input": "a\xff"}',
    "no_json": b'{"text_input": "a"',
    "deep": b'{"text_input": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "objects": {"text_input": "a", "logit_bias": {"5": 1}},
    "not_a_number": b'{"text_input": "a", "temperature": NaN}',
}


@pytest.fixture(scope="module")
def neighbour(server: Server, llm: LLM) -> Iterator[None]:
    """A stream that runs beside every bad request, over and over, and must be right each time."""
    expected = llm.generate(["neighbour"], LONG)[0].token_ids
    stop, wrong = threading.Event(), []

    def run() -> None:
        try:
            with Client(server.grpc_url) as client:
                while not stop.is_set():
                    found = joined(list(client.stream("neighbour", LONG)))[0]
                    if found != expected:
                        wrong.append(found)
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    yield
    stop.set()
    thread.join()
    assert not wrong


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("case", BAD)
def test_bad_request_is_answered_by_name(server: Server, neighbour: None, case: str, endpoint: str) -> None:
    body, message = BAD[case]
    if endpoint == "generate" and body.get("stream"):
        message = "stream is True, but generate sends one response"
    answer = post(server, body, endpoint=endpoint)
    assert answer.status_code == 400
    is_json = answer.headers["content-type"].startswith("application/json")  # the door's own, at both
    error = answer.json()["error"] if is_json else next(events(answer))["error"]
    assert error.startswith("[INVALID_ARG] ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("case", BAD_TYPES)
def test_bad_type_is_an_error(server: Server, neighbour: None, case: str) -> None:
    """Tritonserver would answer most of these 500, and name no field."""
    body = BAD_TYPES[case] if isinstance(BAD_TYPES[case], bytes) else json.dumps(BAD_TYPES[case])
    answer = requests.post(f"{server.http_url}/v2/models/hemiola/generate", data=body, timeout=60)
    assert answer.status_code == 400
    assert "; " in answer.json()["error"], "there is no way out"


def test_bad_types_over_grpc_are_named(server: Server, neighbour: None) -> None:
    text = {"text_input": np.array([b"def "], object)}
    for tensors, options, message in (
        (text | {"max_tokens": np.array([2.0], np.float32)}, {}, "data-type"),
        (text, {"parameters": {"max_tokens": "two"}}, "[INVALID_ARG] max_tokens is 'two'"),
        (text, {"parameters": {"stream": 1}}, "[INVALID_ARG] stream is 1; give true or false"),
        (
            text | {"top_k": np.array([2], np.int64)},
            {"parameters": {"top_k": 2}},
            "top_k is given twice, as a tensor",
        ),
        ({"text_input": np.array([b"a\xff"], object)}, {}, "[INVALID_ARG] text_input is not UTF-8"),
    ):
        ((result, error),) = infer_tensors(server, tensors, **options)
        assert result is None
        assert message in error.message()


def test_client_raises_what_the_llm_raises(server: Server, client: Client, llm: LLM, neighbour: None) -> None:
    for prompt in ("", [], [5] * 1100, [320], [1.5], 5, b"bytes", "a\ud800"):
        with pytest.raises(Refused) as here:
            next(iter(llm.stream(prompt)))
        with pytest.raises(Refused) as there:
            next(iter(client.stream(prompt)))
        if prompt in ("", [], [5] * 1100, [320]):
            assert str(there.value) == str(here.value)
            assert (there.value.code, there.value.field) == (here.value.code, here.value.field)
    with pytest.raises(Refused, match="prompt is empty"):
        client.generate(["a", "", "b"], LONG)
    with pytest.raises(Refused, match=r"no model 'nobody' that is ready \(it has hemiola, second\)"):
        Client(server.grpc_url, "nobody")
