"""The front before a scripted tritonserver, by the official client where it can say it."""

import asyncio
import contextlib
import http.server
import json
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest
import requests
from kit.scripted_triton import ScriptedTriton, script
from kit.served import until
from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, OpenAI, RateLimitError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from hemiola.runtime.api import Logprob, Piece
from hemiola.runtime.errors import Busy, Cancelled, Failed, Refused
from hemiola.runtime.serving import files, slow_reader
from hemiola.runtime.serving.openai import app
from hemiola.runtime.serving.openai.app import FrontLimits
from hemiola.runtime.serving.openai.body import Bodies
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.wire import Answers

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "now",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALL = (
    "hm, 日本\n</think>\n\nI ask.\n\n<tool_call>\n<function=weather>\n"
    "<parameter=city>\nKyōto 👩‍👩‍👧\n</parameter>\n"
    "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"
)
FORCED_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
ARGUMENTS = {"city": "Kyōto 👩‍👩‍👧", "days": 12}


def cut(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)]


def test_chat_with_a_thought_and_a_call(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script(*cut(CALL, 7), cached_tokens=2, drafted=[4, 2], accepted=[3, 1])
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.message.reasoning_content == "hm, 日本\n"
    assert choice.message.content == "I ask."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(triton.script)
    assert answer.usage.prompt_tokens == len(triton.inputs()["input_ids"])
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.metrics["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [1, 2, 1],
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_steps": 4,
        "num_spec_tokens": 2,
    }


def test_a_chat_has_no_special_tokens_but_those_of_its_template(
    client: OpenAI, triton: ScriptedTriton, models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tokenizer puts around a text (here an end) is not for a chat; a completion has it."""
    tokenizer = Tokenizer.from_str(models["bare"].text.tokenizer.to_str())
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    monkeypatch.setattr(models["bare"].text, "tokenizer", tokenizer)
    triton.script = script("x")
    client.chat.completions.create(model="bare", messages=[{"role": "user", "content": "ab"}])
    chat = triton.inputs()["input_ids"]
    client.completions.create(model="bare", prompt="ab")
    assert triton.inputs()["input_ids"] == [*chat, end] and end not in chat


@pytest.mark.parametrize("width", [1, 3, 16, 1000])
def test_streamed_chat_says_the_same_at_any_width(client: OpenAI, triton: ScriptedTriton, width: int) -> None:
    triton.script = script(*cut(CALL, width))
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm, 日本\n"
    assert "".join(delta.content or "" for delta in deltas) == "I ask."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, "weather")]
    assert json.loads("".join(call.function.arguments for call in calls)) == ARGUMENTS
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
        "tool_calls"
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(triton.script)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "calls"),
    [(5, []), (40, ["weather"]), (len(FORCED_CALL), ["weather"]), (len(FORCED_CALL) + 4, ["weather"])],
)
def test_a_forced_call_that_max_tokens_cuts_is_no_content(
    client: OpenAI, triton: ScriptedTriton, stream: bool, end: int, calls: list[str]
) -> None:
    triton.script = script(*f"{FORCED_CALL}\n{FORCED_CALL}"[:end], reason="length")
    answer = client.chat.completions.create(
        model="bare", messages=USER, tools=TOOLS, tool_choice="required", stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    said = [choice.delta if stream else choice.message for choice in choices]
    assert not any(message.content for message in said)
    found = [call.function.name for message in said for call in message.tool_calls or ()]
    assert [name for name in found if name] == calls
    assert choices[-1].finish_reason == "length"


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_json_that_quotes_a_call_was_a_call_in_broken_json(
    client: OpenAI, triton: ScriptedTriton, width: int
) -> None:
    """Whoever wrote the text that it is about could have a function called. So in the thought before it,
    which its grammar lets go on behind a call."""
    quoted = "<tool_call><function=weather></function></tool_call>"
    asked = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
    for said in (json.dumps({"a": quoted}), json.dumps([quoted])):  # a schema may ask for a list
        triton.script = script(*cut(f"hm {quoted}\n</think>\n\n{said}", width))
        (choice,) = client.chat.completions.create(model="tiny", **asked).choices
        message = choice.message
        assert (message.content, message.tool_calls, choice.finish_reason) == (said, None, "stop")
        assert message.reasoning_content == f"hm {quoted}\n"
        triton.script = script(*cut(said, width))
        own = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"json": {}}}
        answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, extra_body=own)
        assert answer.choices[0].message.content == said
    triton.script = script(*cut(f"hm\n</think>\n\n{FORCED_CALL}", width))
    (choice,) = client.chat.completions.create(model="tiny", **asked).choices
    assert not choice.message.content and choice.finish_reason == "tool_calls"


def test_usage_of_a_chunk_counts_no_token_behind_it(
    client: OpenAI, triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though pieces came together, as on a busy machine."""
    begin = Answers.begin

    async def late(answers: Answers) -> None:
        await begin(answers)
        while len(answers._early) < 3:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Answers, "begin", late)
    triton.script = script("a", "b", "c")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="ids", prompt=[5], stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]


def test_a_thought_may_be_switched_off(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script("hi", " there")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model="tiny", messages=USER, extra_body=off)
    assert answer.choices[0].message.content == "hi there"
    assert answer.choices[0].finish_reason == "stop"


def test_history_with_calls_is_rendered_by_the_template(
    client: OpenAI, triton: ScriptedTriton, models: dict
) -> None:
    triton.script = script("ok")
    call = {"name": "weather", "arguments": '{"city": "x", "days": [1]}'}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm\n",
            "refusal": None,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, tool_choice="none")
    assert models["tiny"].text.tokenizer.decode(triton.inputs()["input_ids"], skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nx\n</parameter>\n<parameter=days>\n[1]\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_an_answer_may_be_sent_back_as_it_came(client: OpenAI, triton: ScriptedTriton, models: dict) -> None:
    triton.script = script(CALL)
    message = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    for sent in (message, message.model_dump()):
        client.chat.completions.create(model="tiny", messages=[*USER, sent, result], tools=TOOLS)
        prompt = models["tiny"].text.decode(triton.inputs()["input_ids"])
        assert "<think>\nhm, 日本\n</think>\n\nI ask.\n<tool_call>" in prompt
        assert CALL[CALL.index("<function") :] in prompt


def test_settings_reach_the_model(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script("ok")
    extra = {"top_k": 5, "cache_salt": "me", "priority": -1, "min_p": 0.1, "ignore_eos": True}
    client.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=9, temperature=0.5, top_p=0.9, seed=-1, stop="x",
        logit_bias={"5": -1}, presence_penalty=0.5, frequency_penalty=0.25, user="u", extra_body=extra,
    )  # fmt: skip
    found = triton.inputs()
    assert found["max_tokens"] == 9
    assert {name: found[name] for name in extra} == extra | {"priority": [-1]}  # a tensor: see packing.py
    assert (found["temperature"], found["top_p"], found["stop"]) == (0.5, 0.9, "x")
    assert json.loads(found["logit_bias"]) == {"5": -1}
    client.chat.completions.create(model="tiny", messages=USER)
    found = triton.inputs()
    assert found["temperature"] == 1.0
    assert found["max_tokens"] == 512 - len(found["input_ids"]), "a chat may fill the context"


def test_choices_have_seeds_of_their_own(client: OpenAI, triton: ScriptedTriton, models: dict) -> None:
    triton.script = script("ok", "!")
    answer = client.completions.create(model="tiny", prompt=["a", [5, 6]], n=2, seed=41, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["aok!", "aok!", "#$ok!", "#$ok!"]
    asked = [triton.inputs(i) for i in range(4)]
    assert sorted((one["input_ids"], one["seed"]) for one in asked) == sorted(
        (ids, seed) for ids in (models["tiny"].text.encode("a"), [5, 6]) for seed in (41, 42)
    )
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 8


def test_logprobs_of_parts_of_a_character(client: OpenAI, triton: ScriptedTriton, models: dict) -> None:
    """A piece without text keeps its tokens for the next one."""
    ids = models["tiny"].text.encode("a€b")
    assert len(ids) == 5, "the sign is three tokens"
    pieces = [Piece("a", ids[:1]), Piece("", ids[1:2]), Piece("", ids[2:3])]
    pieces.append(Piece("€b", ids[3:], finish_reason="stop"))
    triton.script = [
        Piece(p.text, p.token_ids, [Logprob(i, -1.0, ((i, -1.0),)) for i in p.token_ids], p.finish_reason)
        for p in pieces
    ]
    whole = client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs
    assert whole.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert whole.text_offset == [0, 1, 1, 1, 2]
    assert whole.top_logprobs[1] == {"bytes:\\xe2": -1.0}
    for with_ids in (False, True):  # then each piece has its tokens at once
        extra = {"return_token_ids": with_ids}
        streamed = client.completions.create(
            model="tiny", prompt="x", logprobs=1, stream=True, extra_body=extra
        )
        found = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
        assert [token for one in found for token in one.tokens] == whole.tokens
        offsets = [offset for one in found for offset in one.text_offset]
        assert offsets == whole.text_offset, "a character in two pieces counted twice"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = list(
        client.chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=1, stream=True, extra_body=off
        )
    )
    content = [t for c in chat if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert bytes(byte for token in content for byte in token.bytes).decode() == "a€b"
    assert content[0].top_logprobs[0].token == "a"


def test_token_ids_on_request(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script("a", "b")
    body = {"return_token_ids": True}
    answer = client.completions.create(model="ids", prompt=[5, 6], extra_body=body)
    assert (answer.choices[0].prompt_token_ids, answer.choices[0].token_ids) == ([5, 6], [7, 7])
    chunks = list(client.completions.create(model="ids", prompt=[5, 6], stream=True, extra_body=body))
    assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == [7, 7]
    assert chunks[0].choices[0].prompt_token_ids == [5, 6]


def test_events_are_ascii_and_end_with_done(start: Callable[..., Front], triton: ScriptedTriton) -> None:
    """Some clients take U+2028 for the end of a line."""
    triton.script = script("é\u2028\x85", "😀")
    body = {"model": "tiny", "prompt": "x", "stream": True}
    answer = requests.post(f"{start().url}/completions", json=body, timeout=60)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.content.isascii()
    events = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    assert events[-1] == b"data: [DONE]"
    found = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events[:-1]]
    assert "".join(found) == "é\u2028\x85😀"


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (
            Refused("too_long", "prompt", message="prompt is 600 tokens"),
            400,
            "context_length_exceeded",
            "prompt",
        ),
        (Refused("too_long", "stop", 9), 400, "invalid_value", "stop"),
        (Refused("out_of_range", "seed", 5), 400, "invalid_value", "seed"),
        (Refused("unknown", "seeed", message="unknown"), 400, "unknown_parameter", "seeed"),
        (Refused("closed", message="the engine is closed"), 400, None, None),
        (Failed("the engine failed"), 503, "engine_failed", None),
        (RuntimeError("[INTERNAL] boom"), 500, "internal_error", None),
        (Busy("8 run and 256 wait; try again in 7 s", retry_after_s=7), 429, "overloaded", None),
        (RuntimeError("unknown model: 'tiny' has no available versions"), 503, "server_lost", None),
        (Cancelled("the request was cancelled"), 503, "cancelled", None),
    ],
)
def test_what_the_model_refuses_has_its_status(
    client: OpenAI, triton: ScriptedTriton, error: Exception, status: int, code: str | None, param: str | None
) -> None:
    triton.script = [error]
    for stream in (False, True):
        with pytest.raises(APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="x", stream=stream)
        found = caught.value
        assert (found.status_code, found.code, found.param) == (status, code, param)
        assert str(error) in found.message
        assert found.response.headers.get("Retry-After") == {429: "7", 503: "1"}.get(status)
    triton.script = script("fine")
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "fine"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("num_prompts", "status"), [(5, 429), (6, 400)])
@pytest.mark.parametrize(("begun", "rows", "queue"), [(False, 2, 3), (True, 1, 4)])
def test_a_batch_that_never_has_room_is_told_to_come_back(
    client: OpenAI, triton: ScriptedTriton, stream: bool, begun: bool, rows: int, queue: int,
    num_prompts: int, status: int,
) -> None:  # fmt: skip
    busy = Busy("full; try again in 2 s", retry_after_s=2, max_rows=rows, max_queue=queue)
    triton.script = [Piece("a", [7])] * begun + [busy]
    room = f"{rows} row{'s' * (rows > 1)}, max_queue={queue}"
    said = (
        rf"prompts x n is 6, the engine takes 5 at once \({room}\)" if status == 400 else "try again in 2 s"
    )
    with pytest.raises(APIError, match=said) as caught:
        list(client.completions.create(model="tiny", prompt=["x"] * num_prompts, stream=stream))
    assert getattr(caught.value, "status_code", status) == status


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
)
def test_a_grammar_is_refused_by_a_name_that_nobody_gave(
    client: OpenAI, triton: ScriptedTriton, asked: dict, param: str, stream: bool
) -> None:
    refused = Refused("malformed", message="no format 'x'", way_out="correct it")
    triton.script = [refused.under("structured_outputs")]
    with pytest.raises(APIStatusError, match=f"{param}: no format 'x'; correct it") as caught:
        client.chat.completions.create(model="bare", messages=USER, stream=stream, **asked)
    assert (caught.value.status_code, caught.value.param) == (400, param)


def test_an_error_after_the_first_token_is_an_event(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = [Piece("a", [7]), RuntimeError("[INTERNAL] boom")]
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(APIError, match="boom"):
        list(stream)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_requests(
    start: Callable[..., Front], triton: ScriptedTriton, stream: bool
) -> None:
    triton.script, triton.pause_s = script(*"abcdefghij" * 100), 0.02

    async def leave() -> None:
        async with AsyncOpenAI(base_url=start().url, api_key="any", max_retries=0) as client:
            asked = {"model": "tiny", "prompt": ["x", "y"], "n": 2, "stream": stream}
            made = asyncio.create_task(client.completions.create(**asked))
            if stream:
                await anext(aiter(await made))
            while len(triton.requests) < 4:
                await asyncio.sleep(0.01)
            made.cancel()

    asyncio.run(leave())
    triton.await_cancelled(4)
    assert set(triton.cancelled) == {request.id for request in triton.requests}


def test_one_failed_choice_cancels_the_others(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script, triton.pause_s = [Piece("a", [7]), RuntimeError("[INTERNAL] boom")], 0.05
    with pytest.raises(APIStatusError, match="boom"):
        client.completions.create(model="tiny", prompt=["x", "y"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_dropped(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "hemiola.openai")
    monkeypatch.setattr(slow_reader, "WRITE_TIMEOUT_S", 0.3)
    triton.script, triton.pause_s = script(*["x" * 100_000] * 200), 0.001
    front = start()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream})
    with socket.create_connection(("127.0.0.1", front.port)) as idle:
        idle.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        until(lambda: "/v1/completions left" in caplog.text)
        until(lambda: len(triton.cancelled) == stream)
        with contextlib.suppress(ConnectionError):
            while idle.recv(1 << 20):
                pass
    assert "the client read nothing for 0.3 s" in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_slowly_is_cut_off(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(slow_reader, "WRITE_TIMEOUT_S", 2.0)  # all of it takes longer
    triton.script = script("x" * 8_000_000)
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream})
    said = bytearray()
    with socket.create_connection(("127.0.0.1", start().port), timeout=60) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(BODY + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        while found := slow.recv(1 << 18):
            said += found
            time.sleep(0.05)
    assert said.count(b"x") > 8_000_000


WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "trickle"])
@pytest.mark.parametrize(
    ("begun", "answers"),
    [
        (b"", []),
        (b"GET /v1/mod", []),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", []),
        (WHOLE, [b"200"]),
        (WHOLE + WHOLE[:30], [b"200"]),
        (BODY + b"Content-Length: 1000\r\n\r\n{", [b"408"]),
        (BODY + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", [b"408"]),
    ],
    ids=["nothing", "line", "header", "kept-alive", "second", "body", "chunk"],
)
def test_a_connection_that_stalls_is_held_for_ever(
    start: Callable[..., Front],
    monkeypatch: pytest.MonkeyPatch,
    begun: bytes,
    answers: list[bytes],
    drip: bytes,
) -> None:
    monkeypatch.setattr(f"{Bodies.__module__}.BODY_TIMEOUT_S", 0.3)
    idle_s = 1.0 if b"200" in answers else 60.0 if answers else 0.3  # what is answered must come in time
    monkeypatch.setattr(f"{Front.__module__}.IDLE_TIMEOUT_S", idle_s)
    with socket.create_connection(("127.0.0.1", start().port), timeout=0.05) as slow:
        slow.sendall(begun)
        said, end = b"", time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while b" 408 " not in said and time.monotonic() < end:  # behind it aiohttp lingers for 10 s
                with contextlib.suppress(TimeoutError):
                    if not (found := slow.recv(1 << 16)):
                        break
                    said += found
                slow.sendall(drip)
        assert time.monotonic() < end, "it is still open"
    assert re.findall(rb"^HTTP/1.1 (\d+)", said, re.MULTILINE)[: len(answers)] == answers


def test_idle_connections_take_all_files_of_the_launcher(
    start: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they have a key or not; it then could not look at its engines, and ended the server."""
    monkeypatch.setattr(files, "most_connections", lambda: 4)
    front = start()
    url = f"http://127.0.0.1:{front.port}/version"
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(requests.Session()) for _ in range(4)]
        for session in idle:  # once it has an answer, its connection is counted
            assert session.get(url, timeout=60).status_code == 200
        for _ in range(20):
            answer = requests.get(url, timeout=60)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.text == "there are too many connections; try again in a moment\n"
        idle.pop().close()
        until(lambda: requests.get(url, timeout=60).status_code == 200)


@pytest.mark.usefixtures("dead_proxy")
def test_its_own_tritonserver_is_not_asked_through_a_proxy(
    models: dict[str, ServedModel], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `http_proxy` it was never ready. Of its address no host is read."""
    monkeypatch.setattr(f"{Answers.__module__}.READY_TIMEOUT_S", 60.0)
    front = Front(models, limits=FrontLimits(), exit_timeout_s=5)
    front.start(f"ipv4:{triton.url}", "http://127.0.0.1:1/metrics")
    try:
        with requests.Session() as session:
            session.trust_env = False
            assert session.get(f"{front.url.removesuffix('/v1')}/health", timeout=60).status_code == 200
    finally:
        front.stop()


SMALL = {"model": "tiny", "prompt": "x"}


def test_bodies_on_their_way_fill_the_memory(start: Callable[..., Front], triton: ScriptedTriton) -> None:
    triton.script = script("fine")
    running = start(max_body=100_000)
    sent = BODY + b"Content-Length: 100000\r\n\r\n" + b"x" * 99_999
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(30)]
        for connection in held:
            connection.settimeout(60)
            connection.sendall(sent)
        until(lambda: select.select(held, [], [], 1)[0])
        assert requests.post(f"{running.url}/completions", json=SMALL, timeout=60).ok, "small ones have room"
        until(lambda: len(select.select(held, [], [], 1)[0]) == 14)
        refused = select.select(held, [], [], 1)[0]
        assert all(b" 429 " in (said := one.recv(1 << 16)) and b"Retry-After: 1" in said for one in refused)
    large = SMALL | {"prompt": "x" * 90_000}  # it is read again, and refused for its tokens
    until(lambda: requests.post(f"{running.url}/completions", json=large, timeout=60).status_code == 400)


def test_a_stream_that_outlasts_the_idle_timeout_is_whole(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Front.__module__}.IDLE_TIMEOUT_S", 1.0)
    triton.script, triton.pause_s = script(*"abcd"), 0.4
    with OpenAI(base_url=start().url, api_key="any", max_retries=0) as client:
        for stream in (False, True):
            asked = client.completions.create(model="tiny", prompt="x", stream=stream)
            assert "".join(c.choices[0].text for c in (asked if stream else [asked])) == "abcd"


def test_keys_are_asked_for(start: Callable[..., Front], triton: ScriptedTriton) -> None:
    triton.script = script("ok")
    front = start(api_keys=("one", "two"))
    for key in ("one", "two"):
        assert OpenAI(base_url=front.url, api_key=key).completions.create(model="tiny", prompt="x").choices
    for said in ("bearer one", "BEARER  two"):  # RFC 9110: the scheme's case is nobody's
        head = {"Authorization": said}
        assert requests.get(f"{front.url}/models", headers=head, timeout=60).status_code == 200
    for said in ("Bearer three", "Bearer on", "Bearer é", "Bearer", "one", "Basic one", "Bearer Bearer one"):
        for encoding in ("utf-8", "latin-1"):
            head = {"Authorization": said.encode(encoding)}
            answer = requests.get(f"{front.url}/models", headers=head, timeout=60)
            assert answer.status_code == 401, said
            assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=front.url, api_key="three", max_retries=0).models.list()
    root = front.url.removesuffix("/v1")
    assert requests.get(f"{root}/health", timeout=60).status_code == 200


def test_a_key_that_is_no_unicode_is_an_error_of_the_server(start: Callable[..., Front]) -> None:
    """As the environment and a command line have it; every request was answered 500."""
    front = start(api_keys=("one", os.fsdecode(b"\xfftwo")))
    for key, status in ((b"one", 200), (b"\xfftwo", 200), (b"\xff", 401)):
        head = {"Authorization": b"Bearer " + key}
        assert requests.get(f"{front.url}/models", headers=head, timeout=60).status_code == status


def test_a_path_writes_lines_of_its_own_into_the_log(
    start: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(models: object, name: str) -> None:
        raise RuntimeError("trouble")

    monkeypatch.setattr(app, "find_model", fails)
    url = start().url
    assert requests.get(f"{url}/models/a%0AE1127%20lost", timeout=60).status_code == 500
    assert [record.getMessage() for record in caplog.records if "trouble" in record.getMessage()] == [
        "GET /v1/models/a%0AE1127%20lost: trouble"
    ]


def test_too_many_requests_are_told_when_to_come_back(
    start: Callable[..., Front], triton: ScriptedTriton
) -> None:
    front = start(max_requests=2)
    triton.script = script(*"abc")
    triton.gate.clear()
    with OpenAI(base_url=front.url, api_key="any", max_retries=0) as client:
        first = client.completions.create(model="tiny", prompt=["x", "y"], stream=True)
        next(first)
        with pytest.raises(RateLimitError, match="requests under way: 2 of 2; try again") as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["Retry-After"] == "1"
        with pytest.raises(RateLimitError):  # its body is not read, which takes long where it is large
            client.completions.create(model="tiny", prompt="x", temperature=-5)
        triton.gate.set()
        list(first)
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "abc"
        with pytest.raises(APIStatusError, match="prompts x n is 3, the server takes 2 at once") as caught:
            client.completions.create(model="tiny", prompt="x", n=3)
        assert caught.value.status_code == 400


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "ids", "bare"]
    assert client.models.retrieve("tiny").max_model_len == 512


def test_health_follows_tritonserver(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Answers.__module__}.READY_TIMEOUT_S", 60.0)
    root = start().url.removesuffix("/v1")
    assert requests.get(f"{root}/health", timeout=60).json() == {"ready": True}
    triton.__exit__()
    assert requests.get(f"{root}/health", timeout=60).status_code == 503
    answer = requests.post(f"{root}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=60)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]


def test_a_tritonserver_that_comes_back_is_found_again(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script("one")
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "one"
    triton.__exit__()
    with pytest.raises(APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="x")
    assert (caught.value.status_code, caught.value.code) == (503, "server_lost")
    with ScriptedTriton(address=triton.url) as again:
        again.script = script("two")
        patient = client.with_options(max_retries=8)
        assert patient.completions.create(model="tiny", prompt="x").choices[0].text == "two"


@pytest.mark.parametrize("status", [200, 503])
def test_metrics_are_those_of_a_page_that_was_refused(
    start: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """They were an empty page where the door of tritonserver's had too many connections."""
    monkeypatch.setattr(app, "METRICS_TIMEOUT_S", 60.0)

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"nv_x 1\nhemiola_healthy 1\n")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.handle_request).start()
        root = start(f"http://127.0.0.1:{page.server_port}/metrics").url.removesuffix("/v1")
        answer = requests.get(f"{root}/metrics", timeout=60)
    assert answer.status_code == status
    if status == 200:
        assert answer.text.splitlines()[1:] == ["# TYPE hemiola_healthy gauge", "hemiola_healthy 1"]
        assert requests.get(f"{root}/metrics", timeout=60).status_code == 503
    else:
        assert answer.json()["error"]["message"].startswith("tritonserver's metrics cannot be read: 503")


def test_a_tritonserver_that_hangs_leaves_metrics_without_a_reason(
    start: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "METRICS_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        root = start(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics").url.removesuffix("/v1")
        answer = requests.get(f"{root}/metrics", timeout=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].endswith("cannot be read: no answer within 0.1 s")


def test_stopping_lets_answers_finish_and_takes_no_new_ones(
    start: Callable[..., Front], triton: ScriptedTriton
) -> None:
    triton.script, triton.pause_s = script(*"abcde"), 0.1
    front = start(exit_timeout_s=60)

    def refuses() -> bool:
        try:
            socket.create_connection(("127.0.0.1", front.port)).close()
        except OSError:
            return True
        return False

    with OpenAI(base_url=front.url, api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        text = next(stream).choices[0].text
        ending = threading.Thread(target=front.stop)
        ending.start()
        until(refuses)
        text += "".join(chunk.choices[0].text for chunk in stream)
        ending.join()
    assert text == "abcde"
    assert not triton.cancelled


def test_stopping_cancels_what_does_not_finish(start: Callable[..., Front], triton: ScriptedTriton) -> None:
    triton.script, triton.pause_s = script(*"abcde" * 100), 0.1
    front = start(exit_timeout_s=0.2)
    with OpenAI(base_url=front.url, api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        next(stream)
        front.stop()
        with pytest.raises(Exception, match=r"\w"):
            list(stream)
    until(lambda: triton.cancelled == [triton.requests[0].id])


def test_a_taken_port_is_refused_by_name(models: dict) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"OpenAI port {port} on 127.0.0.1 cannot be used .*--openai-port"):
            Front(models, port=port)


def test_the_log_has_no_prompt(
    start: Callable[..., Front], triton: ScriptedTriton, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hemiola.openai")
    triton.script = script("answer")
    front = start()
    for body in ({"model": "tiny", "prompt": "secret"}, {"model": "tiny", "prompt": "secret", "n": 0}):
        requests.post(f"{front.url}/completions", json=body, timeout=60)
    for broken in (b"Authorization: secret\0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n"):
        with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
            connection.sendall(BODY + broken)
            assert connection.recv(100).startswith(b"HTTP/1.0 400 ")
    until(lambda: caplog.text.count("a request that") == 2)
    lines = [record.getMessage() for record in caplog.records if record.name == "hemiola.openai"]
    assert [line.split(" ")[:3] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["POST", "/v1/completions", "400"],
        *[["a", "request", "that"]] * 2,
    ]
    assert "secret" not in caplog.text and "answer" not in caplog.text


@pytest.mark.parametrize("key", ["one", "wrong"])
def test_a_broken_gzip_body_is_a_traceback_in_the_log(
    start: Callable[..., Front], caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.DEBUG, "hemiola.openai")
    front = start(api_keys=("one",))
    head = {"Content-Encoding": "gzip", "Authorization": f"Bearer {key}"}
    answer = requests.post(f"{front.url}/completions", data=json.dumps(SMALL), headers=head, timeout=60)
    assert answer.status_code == (400 if key == "one" else 401)
    until(lambda: "POST /v1/completions" in caplog.text)
    assert "Traceback" not in caplog.text
