"""Every door says what the plain run says: ids, text, log-probabilities, bit for bit; after a reload, too."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
from kit.served import Served
from kit.triton_calls import events, ids
from openai import AsyncOpenAI

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.aclient import AsyncClient
from hemiola.runtime.serving.client import Client

pytestmark = pytest.mark.server

AT_ONCE = 32
KEY = "SECRET"
MODELS = {  # the same engine
    "slow": {"drafts": "none", "prefix_cache": False, "pipeline_depth": 0},
    "fast": {"drafts": "mtp", "num_drafts": 2, "prefix_cache": True, "pipeline_depth": 2},
}
SHARED = "import os\n" * 8
PROMPTS: list[str | list[int]] = [
    prompt
    for i in range(16)
    for prompt in (f"def f{i}(", SHARED + f"x{i}", list(range(3 + i, 60)), f"é😀 naïve 日本 {i}")
]


def asked(number: int) -> dict:
    """Greedy and sampled, short and long, with penalties, stops, grammars and log-probabilities."""
    options = {
        "max_tokens": 4 + number % 23,
        "temperature": 0.8 * (number % 2),
        "seed": number - 9,
        "top_p": 0.9,
        "frequency_penalty": 0.5 * (number % 3 == 0),
        "stop": ["zz", "é"],
        "logprobs": number % 3,
    }
    if number % 5 == 0:
        options["logit_bias"] = {"7": -2.0}
    if number % 16 == 6:
        options["structured_outputs"] = {"regex": "[a-f日😀]{5,9}"}
    return options


def params(number: int) -> SamplingParams:
    options = asked(number)
    bias = {int(token): value for token, value in options.pop("logit_bias", {}).items()}
    return SamplingParams(**options, logit_bias=bias)


PARAMS = [params(i) for i in range(len(PROMPTS))]


class Said(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float]


def of_output(output: Output) -> Said:
    values = [one.logprob for one in output.logprobs or ()]
    return Said(output.token_ids, output.text, output.finish_reason, values)


def of_messages(messages: list[dict]) -> Said:
    """Of Triton's responses, with names and values."""
    values = [one["logprob"] for message in messages for one in json.loads(message.get("logprobs", "[]"))]
    found = [token for message in messages for token in ids(message)]
    text = "".join(message["text_output"] for message in messages)
    return Said(found, text, messages[-1]["finish_reason"], values)


def triton_body(number: int) -> dict:
    """JSON texts where Triton takes no objects."""
    body = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in asked(number).items()}
    return body | {"text_input" if isinstance(PROMPTS[number], str) else "input_ids": PROMPTS[number]}


def by_client(served: Served, model: str) -> list[Said]:
    with Client(served.grpc_url, model) as client:
        return [of_output(output) for output in client.generate(PROMPTS, PARAMS)]


def by_async_client(served: Served, model: str) -> list[Said]:
    async def run() -> list[Output]:
        async with AsyncClient(served.grpc_url, model) as client:
            return await client.generate(PROMPTS, PARAMS)

    return [of_output(output) for output in asyncio.run(run())]


def by_grpc(served: Served, model: str) -> list[Said]:
    """NVIDIA's client, all on one stream; numbers are parameters, the rest tensors."""
    answers: SimpleQueue = SimpleQueue()
    found: list[list[dict]] = [[] for _ in PROMPTS]
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(len(PROMPTS)):
            inputs, numbers = [], {}
            for name, value in (triton_body(number) | {"stream": True}).items():
                if isinstance(value, (int, float)):
                    numbers[name] = value
                    continue
                values = value if isinstance(value, list) else [value]
                kind = "INT64" if name == "input_ids" else "BYTES"
                inputs.append(grpcclient.InferInput(name, [len(values)], kind))
                data = values if kind == "INT64" else [text.encode() for text in values]
                inputs[-1].set_data_from_numpy(np.array(data, np.int64 if kind == "INT64" else object))
            client.async_stream_infer(model, inputs, request_id=str(number), parameters=numbers)
        client.stop_stream()
    while not answers.empty():
        result, error = answers.get()
        assert error is None, error
        outputs = {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}
        texts = {n: v[0].decode() if v.dtype == object else v.tolist() for n, v in outputs.items()}
        found[int(result.get_response().id)].append(texts)
    return [of_messages(messages) for messages in found]


def by_http(served: Served, model: str, endpoint: str) -> list[Said]:
    def one(number: int) -> Said:
        body = triton_body(number) | {"stream": endpoint == "generate_stream"}
        url = f"{served.http_url}/v2/models/{model}/{endpoint}"
        answer = requests.post(url, json=body, timeout=120)
        return of_messages(list(events(answer)) if body["stream"] else [answer.json()])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(one, range(len(PROMPTS))))


def by_openai(served: Served, model: str) -> list[Said]:
    """Every other one is streamed."""

    async def one(client: AsyncOpenAI, gate: asyncio.Semaphore, number: int) -> Said:
        options = asked(number)
        own = {"return_token_ids": True, "structured_outputs": options.pop("structured_outputs", None)}
        async with gate:
            made = await client.completions.create(
                model=model, prompt=PROMPTS[number], **options, extra_body=own, stream=number % 2 == 0
            )
            chunks = [chunk async for chunk in made] if number % 2 == 0 else [made]
        choices = [chunk.choices[0] for chunk in chunks]
        return Said(
            [token for choice in choices for token in choice.token_ids],
            "".join(choice.text for choice in choices),
            choices[-1].finish_reason,
            [v for choice in choices if choice.logprobs for v in choice.logprobs.token_logprobs],
        )

    async def run() -> list[Said]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with AsyncOpenAI(base_url=served.openai_url, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, gate, i) for i in range(len(PROMPTS))))

    return asyncio.run(run())


DOORS: dict[str, Callable[[Served, str], list[Said]]] = {
    "Client": by_client,
    "AsyncClient": by_async_client,
    "gRPC": by_grpc,
    "generate": lambda served, model: by_http(served, model, "generate"),
    "generate_stream": lambda served, model: by_http(served, model, "generate_stream"),
    "OpenAI": by_openai,
}


@pytest.fixture(scope="module")
def engine_dir(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("qwen3_5")


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> list[Said]:
    """The plain run: one request after the other."""
    with LLM(engine_dir, **MODELS["slow"], max_rows=1) as llm:
        return [of_output(output) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def served(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("doors") / "models.json"
    file.write_text(
        json.dumps({name: {"engine_dir": str(engine_dir), **own} for name, own in MODELS.items()})
    )
    running = Served(f"--models={file}", f"--control-key={KEY}", "--openai-port=0")
    yield running
    assert running.end() == 0


def test_every_door_says_what_the_plain_run_says(served: Served, expected: list[Said]) -> None:
    """64 mixed prompts, with and without drafts and the prefix cache, which the second door finds warm."""
    assert len(PROMPTS) == 64 and len({one.text for one in expected}) > 40
    for model in MODELS:
        for door, ask in DOORS.items():
            assert ask(served, model) == expected, (model, door)


def test_a_reloaded_engine_says_the_same_through_every_door(served: Served, expected: list[Said]) -> None:
    with grpcclient.InferenceServerClient(served.grpc_url) as control:
        control.unload_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
        control.load_model("fast", headers={"triton-grpc-protocol-hemiola-key": KEY})
    for door, ask in DOORS.items():
        assert ask(served, "fast") == expected, door
