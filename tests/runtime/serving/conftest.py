"""A gRPC server in this process, and a client of it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from kit.fake_triton import Triton
from tritonclient.grpc import service_pb2_grpc

from hemiola.runtime.serving.client import Client


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def url(triton: Triton) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(64))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks it gets no answer."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as connected:
        yield connected
