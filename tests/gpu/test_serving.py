"""`hemiola serve` with engines on a GPU: instances of KIND_GPU, whose every door says the plain run's bits.

With several GPUs, engines are on all of them, and one is of two ranks; a rehearsal has that one, too.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch
from kit.gpu_engines import FAMILIES, MARKS
from kit.served import ENVIRONMENT, SERVE, Served, until

if find_spec("pytriton") is None:
    pytest.skip("needs tritonserver", allow_module_level=True)

import tritonclient.grpc as grpcclient  # isort: skip
from kit.doors import DOORS, PROMPTS, WAYS, Said, models_file, plain_run  # isort: skip
from kit.triton_calls import scrape  # isort: skip
from tritonclient.grpc import model_config_pb2  # isort: skip

from hemiola.runtime.api import SamplingParams  # isort: skip
from hemiola.runtime.errors import Lost  # isort: skip
from hemiola.runtime.serving.client import Client  # isort: skip

pytestmark = [*MARKS, pytest.mark.server]

NUM_GPUS = torch.cuda.device_count()  # a rehearsal has none
MODELS = {f"{way}.{family}": (family, way) for family in FAMILIES for way in WAYS}
DEVICES = {name: i % NUM_GPUS if NUM_GPUS else None for i, name in enumerate(MODELS)}
RANKS = "ranks.qwen3.5-code"
if NUM_GPUS != 1:
    MODELS[RANKS], DEVICES[RANKS] = ("qwen3.5-code", "fast"), 0 if NUM_GPUS else None
LONG = SamplingParams(max_tokens=400, ignore_eos=True, num_drafts=0)
DOORS = {name: door for name, door in DOORS.items() if name != "OpenAI" or find_spec("openai")}


@pytest.fixture(scope="module")
def expected(engine: Callable[..., Path]) -> dict[str, list[Said]]:
    """By model."""
    said = {folder: plain_run(folder) for folder in {engine_of(name, engine) for name in MODELS}}
    return {name: said[engine_of(name, engine)] for name in MODELS}


def engine_of(name: str, engine: Callable[..., Path]) -> Path:
    return engine(MODELS[name][0], **{"tp": 2} if name == RANKS else {})


@pytest.fixture(scope="module")
def served(
    engine: Callable[..., Path], expected: dict, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """All engines open at once. They come back."""
    models = {
        name: {"engine_dir": str(engine_of(name, engine)), **WAYS[way]} for name, (_, way) in MODELS.items()
    }
    for name, device in DEVICES.items():
        models[name] |= {"device": device} if device else {}  # the first is nobody's to ask for
    file = models_file(tmp_path_factory.mktemp("served"), models)
    running = Served(f"--models={file}", "--restart=3", *(["--openai-port=0"] if "OpenAI" in DOORS else []))
    yield running
    assert running.end() == 0, running.said


def all_say(served: Served, expected: dict[str, list[Said]], doors: dict[str, Callable]) -> None:
    """The models beside each other."""

    def differing(name: str) -> list[tuple]:
        """What each door said otherwise, the first of it."""
        found = []
        for door, ask in doors.items():
            pairs = list(zip(ask(served, name), expected[name], strict=True))
            found += [(name, door, i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]][:1]
        return found

    with ThreadPoolExecutor(len(MODELS)) as threads:
        assert [*chain.from_iterable(threads.map(differing, MODELS))] == [], served.said


def test_an_engine_is_an_instance_of_its_gpu(served: Served) -> None:
    kinds = model_config_pb2.ModelInstanceGroup.Kind
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        for name, device in DEVICES.items():
            (group,) = client.get_model_config(name).config.instance_group
            wanted = ("KIND_MODEL", []) if device is None else ("KIND_GPU", [device])
            assert (kinds.Name(group.kind), list(group.gpus)) == wanted


def test_every_door_says_what_the_plain_run_says(served: Served, expected: dict[str, list[Said]]) -> None:
    """64 mixed prompts, with and without drafts and the prefix cache; then what was counted."""
    all_say(served, expected, DOORS)
    page: dict = {}

    def total(name: str, model: str, **labels: str) -> float:
        wanted = {("model", model), *labels.items()}
        return sum(value for (found, own), value in page.items() if found == name and wanted <= set(own))

    asked = len(DOORS) * len(PROMPTS)
    for model, (_, way) in MODELS.items():
        until(lambda: page.update(scrape(served)) or total("hemiola_requests_total", model) >= asked, 20)  # noqa: B023
        assert total("hemiola_requests_total", model, outcome="success") == asked
        assert total("hemiola_healthy", model) == 1
        assert (total("hemiola_accepted_tokens_total", model) > 0) == (way == "fast")


def test_an_engine_whose_process_was_killed_comes_back_with_the_same_answers(
    served: Served, expected: dict[str, list[Said]]
) -> None:
    model = next(reversed(MODELS))
    with Client(served.grpc_url, model, retries=0) as client:
        streams = [client.stream("in flight", LONG) for _ in range(64)]
        next(streams[0])
        os.kill(served.pid(f"models/{model}/"), signal.SIGKILL)
        with pytest.raises(Lost):
            list(streams[-1])
    until(lambda: "ready again" in served.said, 90)
    assert re.search(
        rf"lost: ({re.escape(model)}: its process \d+ has ended|tritonserver ended)", served.said
    )
    all_say(served, expected, {name: DOORS[name] for name in ("Client", "gRPC")})


def test_a_gpu_that_there_is_not_is_refused_at_once(engine: Callable[..., Path]) -> None:
    command = [*SERVE, f"--engine-dir={engine(FAMILIES[0])}", "--device=99"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=90)
    reason = rf"GPU 99, but {NUM_GPUS} GPUs are visible here" if NUM_GPUS else "device is 99, but .* for cpu"
    assert ended.returncode == 2 and re.search(reason, ended.stderr), ended.stderr
