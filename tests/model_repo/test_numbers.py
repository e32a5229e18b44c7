"""Numbers at the edges of their types: through every door the verdict is the LLM's own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from kit.triton_calls import infer_tensors, post

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import read_model

pytestmark = pytest.mark.server

WHOLE = ["max_tokens", "min_tokens", "top_k", "seed", "num_drafts", "priority"]
REAL = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
EDGES = [-1, 0, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63), 2**63, 2**64 + 1, 1.5, 1e300, True, "1"]
PROMPT = [5] * 1019  # 5 tokens more and the context is full
# Triton carries INT64 and FP32: what goes beyond is refused by name of the key, or by Triton, never cut.
BEYOND = [2**63, 2**64 + 1, 1e300]


@pytest.fixture(scope="module")
def front(server: Server, engine_dirs: dict[str, Path]) -> Iterator[str]:
    made = Front({"hemiola": read_model("hemiola", engine_dirs["hemiola"])})
    made.start(server.grpc_url, server.metrics_url)
    yield made.url
    made.stop()


@pytest.fixture(scope="module")
def doors(server: Server, front: str) -> dict[str, Callable[[str, object], str]]:
    """An error's text, or "" if the request was served."""

    def generate(name: str, value: object) -> str:
        answer = post(server, {"input_ids": PROMPT, name: value})
        assert answer.status_code in (200, 400) or answer.json()["error"].startswith("Unable to parse 'data'")
        return answer.json().get("error", "")

    def grpc(name: str, value: object) -> str:
        if value in BEYOND or (name == "priority" and type(value) is not int):
            return generate(name, value)  # NVIDIA's client cannot say it
        tensors, parameters = {"input_ids": np.array(PROMPT, np.int64)}, {}
        if type(value) is int and name in WHOLE:
            tensors[name] = np.array([value], np.int64)
        else:
            parameters[name] = value
        ((_, error),) = infer_tensors(server, tensors, parameters=parameters)
        return error.message() if error else ""

    def openai(name: str, value: object) -> str:
        body = {"model": "hemiola", "prompt": PROMPT, "temperature": 0, name: value}
        answer = requests.post(f"{front}/completions", json=body, timeout=60)
        assert answer.status_code in (200, 400)
        return answer.json().get("error", {}).get("message", "")

    return {"generate": generate, "grpc": grpc, "openai": openai}


def verdict(llm: LLM, name: str, value: object) -> str:
    try:
        llm.generate([PROMPT], SamplingParams(**{name: value}))
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("door", ["generate", "grpc", "openai"])
@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_a_number_at_an_edge_is_taken_or_refused_as_the_llm_does(
    doors: dict[str, Callable[[str, object], str]], llm: LLM, name: str, door: str
) -> None:
    for value in EDGES:
        wanted, found = verdict(llm, name, value), doors[door](name, value)
        if wanted or value not in BEYOND:
            assert bool(found) == bool(wanted), (value, found, wanted)
        assert not found or name in found or found.startswith("Unable to parse 'data'"), (value, found)


def test_a_priority_of_the_client_reaches_the_engine(server: Server, front: str) -> None:
    """A gRPC parameter of that name is Triton's own, which takes no number below 0 and passes none on."""
    with Client(server.grpc_url) as client:
        for priority in (-1, 2):
            assert client.generate([[5]], SamplingParams(max_tokens=1, priority=priority))[0].token_ids
            body = {"model": "hemiola", "prompt": [5], "max_tokens": 1, "priority": priority}
            assert requests.post(f"{front}/completions", json=body, timeout=60).status_code == 200


def test_token_ids_are_never_cut_to_32_bits(server: Server, front: str) -> None:
    for token_id in (2**32 + 5, 2**31, -(2**32) + 5, 2**63 - 1):
        wanted = f"token id {token_id} at position 1 of the prompt is not in the vocabulary 0..319"
        assert wanted in post(server, {"input_ids": [5, token_id]}).json()["error"]
        tensors = {"input_ids": np.array([5, token_id], np.int64)}
        ((_, error),) = infer_tensors(server, tensors)
        assert wanted in error.message()
        body = {"model": "hemiola", "prompt": [5, token_id]}
        assert wanted in requests.post(f"{front}/completions", json=body, timeout=60).text
        stop = post(server, {"input_ids": [5], "stop_token_ids": [token_id]}).json()["error"]
        assert f"stop_token_ids holds {token_id}, the vocabulary is 0..319" in stop


def test_a_seed_means_the_same_through_every_door(server: Server, front: str, llm: LLM) -> None:
    """-1 is 2**64 - 1: the same 64 bits."""
    options = {"max_tokens": 12, "temperature": 2.0, "ignore_eos": True}
    for seed in (-1, 7, 2**63 - 1, -(2**63)):
        one = llm.generate(["def "], SamplingParams(**options, seed=seed))[0]
        assert (
            llm.generate(["def "], SamplingParams(**options, seed=seed % 2**64))[0].token_ids == one.token_ids
        )
        for name in ("seed", "random_seed"):
            said = post(server, {"text_input": "def ", **options, name: seed}).json()
            assert said["output_ids"] == one.token_ids
        body = {"model": "hemiola", "prompt": "def ", **options, "seed": seed}
        for given in (seed, seed % 2**64):
            answer = requests.post(
                f"{front}/completions", data=json.dumps(body | {"seed": given}), timeout=60
            )
            assert answer.json()["choices"][0]["text"] == one.text
