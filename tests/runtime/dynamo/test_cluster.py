"""A real frontend of Dynamo and real workers, where Dynamo is installed (`make cluster`)."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import openai
import pytest
from kit import conversations
from kit.cluster import Cluster, dynamo_python, until

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM

PYTHON = dynamo_python()
pytestmark = pytest.mark.skipif(PYTHON is None, reason="no ai-dynamo; `make cluster` installs it")


@pytest.fixture(scope="module")
def code_engine(bundled: Callable[[str], Path]) -> Path:
    return bundled("qwen3.5-code")


@pytest.fixture
def cluster(code_engine: Path, tmp_path: Path) -> Iterator[Cluster]:
    assert PYTHON is not None
    with Cluster(PYTHON, code_engine, tmp_path, "--num-pages", "600") as made:
        yield made


def test_a_worker_killed_in_the_middle_of_streams_is_not_seen(cluster: Cluster, code_engine: Path) -> None:
    """Two workers; one is killed, another drains, a third comes: every answer is the plain run's."""
    first, second = cluster.add(), cluster.add()
    said = conversations.make(code_engine, 60, seed=1, num_tokens=120)
    assert first.health() in (0, 503) or cluster.instances(), "ready, and nobody knows it"
    cluster.await_workers(2)
    assert (first.health(), second.health()) == (200, 200)
    load = conversations.Load(cluster.url, said, concurrency=6)
    asking = Thread(target=load.run)
    asking.start()
    until(lambda: load.num_done > 8, "the first answers")
    cluster.kill(first)
    third = cluster.add()
    until(lambda: third.health() == 200, "a third worker")
    cluster.drain(second)
    until(lambda: second.health() == 503 or not second.lives, "a drain")
    asking.join()
    assert not load.faults, load.faults[:3]
    until(lambda: not second.lives, "the drained worker's end")
    assert second.process.returncode == 0, second.log.read_text()[-2000:]
    assert third.gauge("hemiola_healthy") == 1.0 and third.gauge("hemiola_generation_tokens_total")
    kinds = load.kinds({})
    assert kinds["same worker"] > kinds["another worker, nothing cached"], kinds


def test_a_worker_of_another_engine_is_asked_when_those_before_it_are_gone(
    cluster: Cluster, bundled: Callable[[str], Path]
) -> None:
    """It has the same name; the frontend serves the card that it saw first."""
    first = cluster.add()
    cluster.await_workers(1)
    cluster.engine_dir = bundled("nemotron-h-code")
    other = cluster.add()
    until(lambda: other.health() == 200, "the other worker")
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)

    def says() -> str:
        answer = client.completions.create(model="hemiola", prompt="def ", max_tokens=20, temperature=0)
        return answer.choices[0].text

    (text,) = {says() for _ in range(6)}
    with LLM(bundled("qwen3.5-code")) as plain:
        (wanted,) = plain.generate("def ", SamplingParams(max_tokens=20, temperature=0.0))
    assert text == wanted.text and first.lives and other.lives
    cluster.kill(first)

    def is_others() -> bool:
        with contextlib.suppress(openai.OpenAIError):  # until the lease of the first one ends
            return says() != text
        return False

    until(is_others, "answers of the other worker")


def test_prompts_of_one_worker_are_answered_by_another(code_engine: Path, tmp_path: Path) -> None:
    """Dynamo's frontend, NIXL between two workers: every answer is the plain run's, from what was moved."""
    assert PYTHON is not None
    if subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no nixl")
    with Cluster(PYTHON, code_engine, tmp_path, "--host-cache-bytes", str(2**25)) as cluster:
        first = cluster.add("--disaggregation-mode", "prefill", "--component", "prefill")
        second = cluster.add("--disaggregation-mode", "decode", "--component", "decode")
        until(lambda: (first.health(), second.health()) == (200, 200), "both workers")
        until(lambda: cluster._has_model(), "the model")
        said = conversations.make(code_engine, 20, seed=4, num_tokens=30)
        load = conversations.Load(cluster.url, said, concurrency=4)
        load.run()
        assert not load.faults, load.faults[:3]
        moved = [turn.answer.cached for turn in load.later]
        assert sum(cached > 0 for cached in moved) > len(moved) / 2, moved
        assert "computed here" not in second.log.read_text()
