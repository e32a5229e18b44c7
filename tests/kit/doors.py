"""The doors of a served model, and 64 mixed requests that are to be answered the same through each."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import requests
import tritonclient.grpc as grpcclient
from kit.served import Served
from kit.triton_calls import events, ids, joined

from hemiola.runtime.api import Output, PromptLogprobs, SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.aclient import AsyncClient
from hemiola.runtime.serving.client import Client

AT_ONCE = 32
WAYS = {  # to open an engine
    "slow": {"drafts": "none", "prefix_cache": False, "pipeline_depth": 0},
    "fast": {"drafts": "mtp", "num_drafts": 2, "prefix_cache": True, "pipeline_depth": 2},
}
SHARED = "import os\n" * 8
PROMPTS: list[str | list[int]] = [
    prompt
    for i in range(16)
    for prompt in (f"def f{i}(", SHARED + f"x{i}", list(range(3 + i, 60)), f"é😀 naïve 日本 {i}")
]


OWN = [  # each with other prompts, greedy and sampled
    {},
    {"repetition_penalty": 0.3, "top_k": 20},
    {"frequency_penalty": -1.5, "presence_penalty": -0.5},
    {"logit_bias": {"7": -2.0, "40": 3.5}, "min_p": 0.01},
    {"bad_words_ids": [[17, 18], *([i] for i in range(0, 320, 3))], "bad_words": ["e", "é"]},
    {"stop_token_ids": list(range(0, 320, 4)), "min_tokens": 3},
    {"structured_outputs": {"regex": "[a-f日😀]{5,9}"}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}}}},
    {"structured_outputs": {"choice": ["日本 yes", "日本 no"]}},
    {"structured_outputs": {"grammar": 'root ::= "(" root? ")"'}},
    {"ignore_eos": True, "num_drafts": 0, "priority": 1, "cache_salt": "me"},  # no other tokens, perhaps
]


def asked(number: int) -> dict:
    """Greedy and sampled, short and long, with penalties, stops, grammars and log-probabilities."""
    return shared(number) | OWN[number % len(OWN)]


def shared(number: int) -> dict:
    return {
        "max_tokens": 4 + number % 23,
        "temperature": 0.8 * (number % 2),
        "seed": number - 9,
        "top_p": 0.9,
        "stop": ["zz", "é"],
        "logprobs": number % 3,
        **({"prompt_logprobs": number % 5} if number % 4 == 1 else {}),  # not in the streams of `by_openai`
    }


def params(options: dict) -> SamplingParams:
    bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
    return SamplingParams(**options | {"logit_bias": bias})


PARAMS = [params(asked(i)) for i in range(len(PROMPTS))]


class Said(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float]
    prompt: list[float | None]  # log-probabilities of its tokens


def of_output(output: Output) -> Said:
    values = [one.logprob for one in output.logprobs or ()]
    scores = of_prompt(output.prompt_logprobs)
    return Said(output.token_ids, output.text, output.finish_reason, values, scores)


def of_prompt(found: PromptLogprobs | None) -> list[float | None]:
    return [one and one.logprob for one in found or ()]


def of_messages(messages: list[dict]) -> Said:
    """Of Triton's responses, with names and values."""
    assert [message["finish_reason"] for message in messages if "finish_reason" in message] == [
        messages[-1]["finish_reason"]
    ]
    values = [one["logprob"] for message in messages for one in json.loads(message.get("logprobs", "[]"))]
    found = [token for message in messages for token in ids(message)]
    text = "".join(message["text_output"] for message in messages)
    scores = [one and one["logprob"] for one in json.loads(messages[0].get("prompt_logprobs", "[]"))]
    return Said(found, text, messages[-1]["finish_reason"], values, scores)


def triton_body(number: int) -> dict:
    """JSON texts where Triton takes no objects and no lists of lists."""
    body = asked(number)
    for name in {"logit_bias", "structured_outputs", "bad_words_ids"} & body.keys():
        body[name] = json.dumps(body[name])
    return body | {"text_input" if isinstance(PROMPTS[number], str) else "input_ids": PROMPTS[number]}


def by_client(served: Served, model: str) -> list[Said]:
    with Client(served.grpc_url, model) as client:
        return [of_output(output) for output in client.generate(PROMPTS, PARAMS)]


def by_client_in_streams(served: Served, model: str) -> list[Said]:
    def one(prompt: str | list[int], own: SamplingParams) -> Said:
        pieces = list(client.stream(prompt, own))
        assert all(piece.finish_reason is None for piece in pieces[:-1])
        values = [one.logprob for piece in pieces for one in piece.logprobs or ()]
        counts.append(len(pieces))
        return Said(*joined(pieces), pieces[-1].finish_reason, values, of_prompt(pieces[0].prompt_logprobs))

    counts: list[int] = []
    with Client(served.grpc_url, model) as client, ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(one, PROMPTS, PARAMS))
    assert max(counts) > 2, "streams that come all at once are none"
    return found


def by_async_client(served: Served, model: str) -> list[Said]:
    async def run() -> list[Output]:
        async with AsyncClient(served.grpc_url, model) as client:
            return await client.generate(PROMPTS, PARAMS)

    return [of_output(output) for output in asyncio.run(run())]


def by_grpc(served: Served, model: str) -> list[Said]:
    """NVIDIA's client, all on one stream; of every other request numbers are parameters, not tensors."""
    answers: SimpleQueue = SimpleQueue()
    found: list[list[dict]] = [[] for _ in PROMPTS]
    ended = [False] * len(PROMPTS)
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(len(PROMPTS)):
            inputs, numbers = [], {}
            for name, value in (triton_body(number) | {"stream": True}).items():
                if isinstance(value, (int, float)) and number % 2 and name != "priority":
                    numbers[name] = value
                else:
                    inputs.append(tensor(name, value if isinstance(value, list) else [value]))
            options = {"request_id": str(number), "parameters": numbers, "enable_empty_final_response": True}
            client.async_stream_infer(model, inputs, **options)
        client.stop_stream()
    while not answers.empty():
        result, error = answers.get()
        assert error is None, error
        response = result.get_response()
        number = int(response.id)
        assert not ended[number], "an empty response after the last token"
        ended[number] = response.parameters["triton_final_response"].bool_param
        outputs = {one.name: result.as_numpy(one.name) for one in response.outputs}
        found[number].append(
            {n: v[0].decode() if v.dtype == object else v.tolist() for n, v in outputs.items()}
        )
    assert all(ended)
    return [of_messages(messages) for messages in found]


def tensor(name: str, values: list) -> grpcclient.InferInput:
    kind, dtype = {bool: ("BOOL", bool), int: ("INT64", np.int64), float: ("FP32", np.float32)}.get(
        type(values[0]), ("BYTES", object)
    )
    made = grpcclient.InferInput(name, [len(values)], kind)
    made.set_data_from_numpy(np.array([v.encode() if isinstance(v, str) else v for v in values], dtype))
    return made


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

    from openai import AsyncOpenAI  # not on every machine

    async def one(client: AsyncOpenAI, gate: asyncio.Semaphore, number: int) -> Said:
        options = asked(number) | {"return_token_ids": True}
        async with gate:
            made = await client.completions.create(
                model=model, prompt=PROMPTS[number], extra_body=options, stream=number % 2 == 0
            )
            chunks = [chunk async for chunk in made] if number % 2 == 0 else [made]
        choices = [chunk.choices[0] for chunk in chunks]
        return Said(
            [token for choice in choices for token in choice.token_ids],
            "".join(choice.text for choice in choices),
            choices[-1].finish_reason,
            [v for choice in choices if choice.logprobs for v in choice.logprobs.token_logprobs],
            [one and next(iter(one.values()))["logprob"] for one in scores_of(choices[0])],
        )

    def scores_of(choice: Any) -> list:
        return choice.model_dump().get("prompt_logprobs") or []

    async def run() -> list[Said]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with AsyncOpenAI(base_url=served.openai_url, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, gate, i) for i in range(len(PROMPTS))))

    return asyncio.run(run())


DOORS: dict[str, Callable[[Served, str], list[Said]]] = {
    "Client": by_client,
    "Client.stream": by_client_in_streams,
    "AsyncClient": by_async_client,
    "gRPC": by_grpc,
    "generate": lambda served, model: by_http(served, model, "generate"),
    "generate_stream": lambda served, model: by_http(served, model, "generate_stream"),
    "OpenAI": by_openai,
}


def models_file(folder: Path, models: dict[str, dict]) -> Path:
    """For --models."""
    file = folder / "models.json"
    file.write_text(json.dumps(models))
    return file


def plain_run(engine_dir: Path, asked: list[SamplingParams] = PARAMS) -> list[Said]:
    """What every door must say: one request after the other."""
    with LLM(engine_dir, **WAYS["slow"], max_rows=1) as llm:
        return [of_output(output) for output in llm.generate(PROMPTS, asked)]
