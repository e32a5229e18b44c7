"""What a real tritonserver answers, against the LLM in this process."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kit.triton_calls import events, ids, infer_tensors, joined, post

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server

pytestmark = pytest.mark.server

PROMPTS: list[str | list[int]] = [
    "def ",
    "é😀 naïve",
    [17],
    list(range(3, 60)),
    *(f"class {'x' * i}:\n    " for i in range(3, 35, 3)),
    "import os\n" * 20,
]


def same(output: Output, expected: Output) -> None:
    for name in ("prompt_token_ids", "token_ids", "text", "finish_reason"):
        assert getattr(output, name) == getattr(expected, name), name
    assert output.metrics.num_prompt_tokens == len(expected.prompt_token_ids)
    assert output.metrics.num_output_tokens == len(expected.token_ids)


def test_16_streams_at_once_equal_the_llm_token_for_token(client: Client, llm: LLM) -> None:
    params = [SamplingParams(max_tokens=20 + 3 * i, ignore_eos=i % 2 == 0) for i in range(len(PROMPTS))]
    assert len(PROMPTS) == 16
    expected = llm.generate(PROMPTS, params)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = list(
            threads.map(lambda pair: list(client.stream(*pair)), zip(PROMPTS, params, strict=True))
        )
    assert max(map(len, streams)) > 1, "streams that come all at once are none"
    for pieces, one in zip(streams, expected, strict=True):
        assert joined(pieces) == (one.token_ids, one.text)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [one.finish_reason]


def test_generate_equals_the_llm(client: Client, llm: LLM) -> None:
    params = [
        SamplingParams(
            max_tokens=12, temperature=0.7, top_p=0.9, top_k=20, seed=2**64 - 1 - i, logprobs=i % 3 or None
        )
        for i in range(len(PROMPTS))
    ]
    for output, one in zip(client.generate(PROMPTS, params), llm.generate(PROMPTS, params), strict=True):
        same(output, one)
        assert output.logprobs == one.logprobs


def test_every_sampling_option_reaches_the_engine_over_each_protocol(
    server: Server, client: Client, llm: LLM
) -> None:
    free = llm.generate(["def "], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    first, second, third = free.token_ids[:3]
    for asked, body in (
        ({"repetition_penalty": 0.3}, None),
        ({"frequency_penalty": -1.5, "presence_penalty": -0.5}, None),
        ({"logit_bias": {first: -100.0}}, {"logit_bias": f'{{"{first}": -100.0}}'}),
        (
            {"bad_words_ids": ((first, second), (third,))},
            {"bad_words_ids": f"[[{first}, {second}], [{third}]]"},
        ),
        ({"stop_token_ids": (second,), "min_tokens": 5}, {"stop_token_ids": [second], "min_tokens": 5}),
    ):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **asked)
        one = llm.generate(["def "], params)[0]
        assert one.token_ids != free.token_ids, "the option changes nothing here"
        same(client.generate(["def "], params)[0], one)
        answer = post(
            server, {"text_input": "def ", "max_tokens": 20, "ignore_eos": True, **(body or asked)}
        ).json()
        assert answer["output_ids"] == one.token_ids, asked


def test_structured_outputs_over_each_protocol(server: Server, client: Client, llm: LLM) -> None:
    for asked, is_right in (
        (
            {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
            json.loads,
        ),
        ({"regex": "[a-c]{3}[0-9]"}, re.compile("[a-c]{3}[0-9]").fullmatch),
        ({"choice": ["é😀 yes", "é no"]}, {"é😀 yes", "é no"}.__contains__),
        ({"grammar": 'root ::= "(" root? ")"'}, re.compile(r"\(+\)+").match),
    ):
        params = SamplingParams(max_tokens=60, seed=5, temperature=2.0, structured_outputs=asked)
        one = llm.generate(["def "], params)[0]
        assert one.finish_reason == "length" or is_right(one.text), one.text
        same(client.generate(["def "], params)[0], one)
        body = {"text_input": "def ", "max_tokens": 60, "seed": 5, "temperature": 2.0}
        assert (
            post(server, body | {"structured_outputs": json.dumps(asked)}).json()["output_ids"]
            == one.token_ids
        )
    three = {"text_input": "def ", "n": 3, "seed": 1, "temperature": 3.0, "max_tokens": 9}
    said = post(server, three | {"structured_outputs": '{"regex": "[a-c]{4}"}'}).json()["text_output"]
    assert len(said) == 3 and all(re.fullmatch("[a-c]{4}", text) for text in said) and len(set(said)) > 1
    with pytest.raises(Refused, match="structured_outputs: invalid regex"):
        client.generate(["def "], SamplingParams(structured_outputs={"regex": "["}))


def test_stop_strings_and_ids_reach_the_engine(client: Client, llm: LLM) -> None:
    free = llm.generate(["def "], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    for params in (
        SamplingParams(max_tokens=40, ignore_eos=True, stop=("never there", free.text[9:11])),
        SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(free.token_ids[6],)),
    ):
        output, one = client.generate(["def "], params)[0], llm.generate(["def "], params)[0]
        assert output.finish_reason == "stop"
        same(output, one)


def test_second_model_answers_with_its_own_engine(server: Server, engine_dirs: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with LLM(engine_dirs["second"], max_rows=1) as other, Client(server.grpc_url, "second") as client:
        same(client.generate(["def "], params)[0], other.generate(["def "], params)[0])


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


def test_http_stream_sends_deltas_and_only_the_last_has_a_finish_reason(server: Server, llm: LLM) -> None:
    one = llm.generate(["é😀 "], SamplingParams(max_tokens=500, ignore_eos=True))[0]
    body = {"text_input": "é😀 ", "max_tokens": 500, "ignore_eos": True, "stream": True}
    answer = post(server, body, endpoint="generate_stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = list(events(answer))
    assert len(found) > 2
    assert "".join(event["text_output"] for event in found) == one.text
    assert [t for event in found for t in ids(event)] == one.token_ids
    assert [event.get("finish_reason") for event in found] == [None] * (len(found) - 1) + ["length"]
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


def test_nvidias_client_with_every_setting_as_a_tensor(server: Server, llm: LLM) -> None:
    settings = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.01, "top_k": 30, "max_tokens": 15}
    settings |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3}
    settings |= {"min_tokens": 3, "priority": -1, "num_drafts": 0}
    params = SamplingParams(
        **settings, seed=7, ignore_eos=True, stop=("zz",), stop_token_ids=(9,), logit_bias={5: 0.1, 6: -2.0},
        bad_words_ids=((17, 18), (19,)), cache_salt="me",
    )  # fmt: skip
    one = llm.generate(["def "], params)[0]
    tensors = {"text_input": np.array([b"def "], object), "stop": np.array([b"zz"], object)}
    tensors |= {
        "logit_bias": np.array([b'{"5": 0.1, "6": -2}'], object),
        "cache_salt": np.array([b"me"], object),
    }
    tensors |= {
        "bad_words_ids": np.array([b"[[17, 18], [19]]"], object),
        "stop_token_ids": np.array([9], np.int64),
    }
    tensors |= {"seed": np.array([7], np.int64), "ignore_eos": np.array([True]), "stream": np.array([True])}
    for name, value in settings.items():
        tensors[name] = np.array([value], np.float32 if isinstance(value, float) else np.int64)
    results = infer_tensors(server, tensors, enable_empty_final_response=True)
    assert all(error is None for _, error in results)
    found = [result for result, _ in results]
    assert np.concatenate([result.as_numpy("output_ids") for result in found]).tolist() == one.token_ids
    finals = [r.get_response().parameters["triton_final_response"].bool_param for r in found]
    assert finals == [False] * (len(found) - 1) + [True], "no empty response after the last token"
