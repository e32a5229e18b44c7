"""`hemiola serve --openai-port`: what leaves it is what the LLM in this process says; so ../test_doors.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
import requests
from kit.served import Served
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.llm import LLM

pytestmark = pytest.mark.server

OPTIONS = {"drafts": "mtp", "num_drafts": 2}
SERVE = ("--openai-port=0", "--drafts=mtp", "--num-drafts=2", "--restart=1")
USER = [{"role": "user", "content": "héllo"}]


@pytest.fixture(scope="module")
def served(engine_dir: Path) -> Iterator[Served]:
    """A server that ends well when it is told to."""
    running = Served(f"--engine-dir={engine_dir}", *SERVE)
    yield running
    assert running.end() == 0
    assert running.process.stdout.read().splitlines()[-1] == "stopped"


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.openai_url, api_key="any", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, **OPTIONS) as opened:
        yield opened


def logprobs_of(output: Output) -> list[float]:
    return [one.logprob for one in output.logprobs or ()]


def test_a_chat_is_the_llms(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    one = llm.generate([llm.chat_text(USER)], params)[0]
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.chat.completions.create(
        model="hemiola", messages=USER, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2,
        extra_body=extra,
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.prompt_token_ids, choice.token_ids) == (one.prompt_token_ids, one.token_ids)
    assert choice.message.content == one.text
    assert [token.logprob for token in choice.logprobs.content] == logprobs_of(one)
    assert answer.usage.total_tokens == len(one.prompt_token_ids) + 12
    streamed = list(
        client.chat.completions.create(
            model="hemiola", messages=USER, max_tokens=12, temperature=0, stream=True, extra_body=extra
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == one.text
    assert [t for chunk in streamed for t in chunk.choices[0].token_ids] == one.token_ids


def test_cached_tokens_are_counted_and_a_salt_keeps_them_apart(client: OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = client.completions.create(
            model="hemiola", prompt=[9] * 100, max_tokens=2, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 96, 0]


TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Kyōto", 'a "b" </tool_call>']}},
            },
        },
    },
]
ONE = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", ONE])
def test_a_forced_call_is_whole_and_fits(client: OpenAI, choice: object) -> None:
    """From a model that says nothing else of use; with drafts; the same, streamed or not."""
    asked = {
        "model": "hemiola", "messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200,
        "temperature": 0, "parallel_tool_calls": False,
    }  # fmt: skip
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert arguments.keys() == {"city", "days"} and arguments["days"] <= 9
        assert arguments["city"] in ("Kyōto", 'a "b" </tool_call>')
    if choice is ONE:
        assert call.function.name == "weather"
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [one for delta in deltas for one in delta.tool_calls or ()]
    assert [one.function.name for one in calls if one.id] == [call.function.name]
    assert "".join(one.function.arguments for one in calls) == call.function.arguments


def test_an_answer_fits_its_schema(client: OpenAI) -> None:
    class Found(BaseModel):
        a: Annotated[int, Field(ge=0, le=99)]
        b: Literal["x", "é"]

    asked = {"model": "hemiola", "messages": USER, "temperature": 0, "max_tokens": 60}
    (choice,) = client.chat.completions.parse(**asked, response_format=Found).choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Found)
    with client.chat.completions.stream(**asked, response_format=Found) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    wanted = {"type": "json_schema", "json_schema": {"name": "s"}}
    for wrong in (
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        {"type": "object", "minProperties": 5, "maxProperties": 2},
    ):
        wanted["json_schema"]["schema"] = wrong
        with pytest.raises(BadRequestError, match="response_format"):
            client.chat.completions.create(**asked, response_format=wanted)


def test_a_prompt_beyond_the_context_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"prompt is 600 tokens, max_len=512") as caught:
        client.completions.create(model="hemiola", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"


FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d sends it
LARGE = b'{"text_input": "' + b"a" * (10 << 20) + b'"}'
BODIES = {
    "30 MB": (413, b'{"text_input": "' + b"a" * (30 << 20) + b'"}'),
    "10 MB": (400, LARGE),
    "10 MB in chunks": (400, [LARGE[at : at + 2**16] for at in range(0, len(LARGE), 2**16)]),
    "open brackets": (400, b'{"text_input": ' + b"[" * 60_000),
}


@pytest.mark.parametrize("door", ["generate", "health", "metrics"])
@pytest.mark.parametrize(("status", "body"), BODIES.values(), ids=BODIES)
def test_a_body_ends_tritonserver_and_every_stream(
    served: Served, client: OpenAI, door: str, status: int, body: bytes | list[bytes]
) -> None:
    url = {
        "generate": f"{served.http_url}/v2/models/hemiola/generate",
        "health": f"{served.http_url}/v2/health/ready",
        "metrics": served.metrics_url,
    }[door]
    tritonserver = served.pid("bin/tritonserver")
    asked = {"model": "hemiola", "prompt": "def ", "temperature": 0, "max_tokens": 300}
    asked["extra_body"] = {"ignore_eos": True, "num_drafts": 0}
    stream = client.completions.create(**asked, stream=True)
    first = next(stream)  # on a busy machine it may bring all there is
    data = iter(body) if isinstance(body, list) else body
    answer = requests.post(url, data=data, headers=FORM, timeout=60)
    assert answer.status_code == status or (door != "generate" and 400 <= answer.status_code < 500), answer
    assert [chunk.choices[0].finish_reason for chunk in (first, *stream)][-1] == "length"
    assert served.pid("bin/tritonserver") == tritonserver and "lost" not in served.said


def test_a_long_query_ends_tritonserver(served: Served) -> None:
    answer = requests.get(f"{served.http_url}/v2/health/ready?{'a' * (10 << 20)}", timeout=60)
    assert answer.status_code == 414
    assert requests.get(f"{served.http_url}/v2/health/ready", timeout=60).status_code == 200
