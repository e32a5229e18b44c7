"""One real tritonserver with two engines, for the whole folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server

MAX_LEN = 1024
ENGINES = {"hemiola": "qwen3_5", "second": "nemotron_h_dense"}


@pytest.fixture(scope="session")
def engine_dirs(tiny_engine: Callable[..., Path]) -> dict[str, Path]:
    """Long enough for streams that are still there when somebody else has left."""
    return {name: tiny_engine(family, max_len=MAX_LEN) for name, family in ENGINES.items()}


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_each_engine() -> Iterator[None]:
    """For servers started from here: threads that wait for a busy core make an engine 10 times slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def server(engine_dirs: dict[str, Path]) -> Iterator[Server]:
    # a random head's drafts never stay, and the clock would soon say that none pay
    fixed = {"adaptive_drafts": False}
    # LLM does not bound priorities: what it takes, this server takes
    settings = {"hemiola": {"min_priority": -(2**63)} | fixed, "second": {"drafts": "ngram"} | fixed}
    with Server(engine_dirs, start_timeout_s=600, settings_of=settings) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="session")
def llm(engine_dirs: dict[str, Path]) -> Iterator[LLM]:
    """The same engine in this process: what the server must say."""
    with LLM(engine_dirs["hemiola"]) as opened:
        yield opened
