"""What a real tritonserver answers; that tokens are the LLM's: tests/runtime/serving/test_doors.py."""

import re
from pathlib import Path

import pytest
from kit.triton_calls import events, post

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server

pytestmark = pytest.mark.server


def test_second_model_answers_with_its_own_engine(server: Server, engine_dirs: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with LLM(engine_dirs["second"], max_rows=1) as other, Client(server.grpc_url, "second") as client:
        (output,), (one,) = client.generate(["def "], params), other.generate(["def "], params)
    for name in ("prompt_token_ids", "token_ids", "text", "finish_reason"):
        assert getattr(output, name) == getattr(one, name), name
    assert output.metrics.num_prompt_tokens == len(one.prompt_token_ids)
    assert output.metrics.num_output_tokens == len(one.token_ids)


def test_n_answers_follow_a_grammar(server: Server) -> None:
    three = {"text_input": "def ", "n": 3, "seed": 1, "temperature": 3.0, "max_tokens": 9}
    said = post(server, three | {"structured_outputs": '{"regex": "[a-c]{4}"}'}).json()["text_output"]
    assert len(said) == 3 and all(re.fullmatch("[a-c]{4}", text) for text in said) and len(set(said)) > 1


def test_http_generate_takes_text_and_ids_and_answers_once(server: Server, llm: LLM) -> None:
    one = llm.generate(["é😀 "], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    prompt_ids = llm.encode("é😀 ")
    for prompt in ({"text_input": "é😀 "}, {"input_ids": prompt_ids}):
        answer = post(server, {**prompt, "max_tokens": 9, "ignore_eos": True, "id": "mine"})
        assert answer.status_code == 200
        assert answer.json() == {
            "id": "mine",
            "model_name": "hemiola",
            "model_version": "1",
            "text_output": one.text,
            "output_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "num_input_tokens": len(prompt_ids),
            "num_output_tokens": len(one.token_ids),
        }


def test_http_stream_sends_deltas(server: Server, llm: LLM) -> None:
    body = {"text_input": "é😀 ", "max_tokens": 500, "ignore_eos": True, "stream": True}
    answer = post(server, body, endpoint="generate_stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = list(events(answer))
    assert len(found) > 2
    assert (found[-1]["num_input_tokens"], found[-1]["num_output_tokens"]) == (len(llm.encode("é😀 ")), 500)


def test_http_stream_false_is_one_event(server: Server) -> None:
    found = list(events(post(server, {"text_input": "def ", "max_tokens": 20}, endpoint="generate_stream")))
    assert len(found) == 1


def test_http_chat_wraps_the_text_as_a_users_message(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    one = llm.generate([llm.chat_text([{"role": "user", "content": "hello"}])], params)[0]
    answer = post(server, {"text_input": "hello", "chat": True, "max_tokens": 8, "ignore_eos": True}).json()
    assert answer["output_ids"] == one.token_ids
    assert answer["num_input_tokens"] == len(one.prompt_token_ids)


def test_a_text_of_many_alphabets_comes_back_whole(server: Server, llm: LLM) -> None:
    """The tiny model says nothing readable, so the prompt is what can be compared: by its ids."""
    text = "naïve Ελληνικά 日本語 👩‍👩‍👧 \x00 \u200b end"
    answer = post(server, {"text_input": text, "max_tokens": 1, "return_input_ids": True}).json()
    assert answer["input_ids"] == llm.encode(text)
