"""Who reaches which door of a `hemiola serve`, and what ends when it is told to end."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from hemiola.runtime.cli import serve
from hemiola.runtime.cli.serve import API_KEY, FrontPlan, doors, grpc_host, triton_host
from hemiola.runtime.serving.openai.model import read_model
from hemiola.runtime.serving.options import OpenaiOptions, ServerOptions
from hemiola.runtime.serving.ports import Ports


@pytest.mark.parametrize(
    ("server", "openai", "environment", "host"),
    [
        ({}, {}, "", "127.0.0.1"),
        ({"host": "0.0.0.0"}, {}, "", "0.0.0.0"),
        ({"host": "0.0.0.0"}, {"openai_port": 9000}, "", "0.0.0.0"),
        ({"host": "0.0.0.0"}, {"openai_port": 9000, "openai_api_key": ("k",)}, "", "127.0.0.1"),
        ({"host": "0.0.0.0"}, {"openai_port": 9000}, "k", "127.0.0.1"),
        ({"host": "0.0.0.0"}, {}, "k", "0.0.0.0"),
        (
            {"host": "0.0.0.0", "triton_host": "10.0.0.1"},
            {"openai_port": 9000, "openai_api_key": ("k",)},
            "",
            "10.0.0.1",
        ),
    ],
)
def test_a_key_guards_one_door_of_two(
    monkeypatch: pytest.MonkeyPatch, server: dict, openai: dict, environment: str, host: str
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    if environment:
        monkeypatch.setenv(API_KEY, environment)
    own = ServerOptions(**server)
    plan = FrontPlan(OpenaiOptions(**openai), {}, 30, own.host)
    assert triton_host(own, plan) == host


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "0.0.0.0", "triton_host": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_a_door_whose_callers_can_end_the_server_opens_with_the_others(given: dict, expected: str) -> None:
    assert grpc_host(ServerOptions(**given)) == expected


def test_nobody_is_told_who_reaches_which_door() -> None:
    server = SimpleNamespace(host="127.0.0.1", grpc_host="127.0.0.1", ports=Ports(1, 2, 3))
    front = SimpleNamespace(host="0.0.0.0", port=4)
    assert doors(server, front, ("k",)) == [
        "door     127.0.0.1:1 HTTP: this machine only, no key",
        "door     127.0.0.1:2 gRPC: this machine only, no key",
        "door     127.0.0.1:3 metrics: this machine only, no key",
        "door     0.0.0.0:4 OpenAI: every network of this machine,"
        " a key for /v1, none for /health and /metrics",
    ]
    assert doors(server, front, ())[-1].endswith("every network of this machine, no key")
    server.host = "10.0.0.1"
    assert doors(server, None, ()) == [
        "door     10.0.0.1:1 HTTP: the network of this address, no key",
        "door     127.0.0.1:2 gRPC: this machine only, no key",
        "door     10.0.0.1:3 metrics: the network of this address, no key",
    ]


@pytest.mark.parametrize(
    ("serves", "drains", "expected"),
    [
        (KeyboardInterrupt, None, ["starts", "refuses", "says so", "tritonserver drains", "waits"]),
        (KeyboardInterrupt, RuntimeError, ["starts", "refuses", "says so", "tritonserver drains", "closes"]),
        (RuntimeError, RuntimeError, ["starts", "tritonserver drains", "closes"]),
    ],
)
def test_the_doors_drain_one_after_the_other_or_are_left_open(
    monkeypatch: pytest.MonkeyPatch,
    serves: type[BaseException],
    drains: type[BaseException] | None,
    expected: list[str],
) -> None:
    """The OpenAI API first, while tritonserver took new requests; and not at all, if requests were lost."""
    happened: list[str] = []

    class Server:
        engines, http_url, grpc_url, metrics_url, door_key = {}, "", "", "", ""
        host, grpc_host, ports, printer = "127.0.0.1", "127.0.0.1", Ports(1, 2, 3), None

        def __init__(self) -> None:
            self.fronts: list[SimpleNamespace] = []

        def check(self) -> None: ...
        def serve(self, restarts: int) -> None:
            raise serves

        def refuse(self) -> None:
            for front in self.fronts:
                front.refuse()

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None:
            happened.append("tritonserver drains")
            if drains is not None:
                raise drains

    def note(what: str) -> object:
        return lambda *_: happened.append(what)

    front = SimpleNamespace(
        host="127.0.0.1", port=4, url="", start=note("starts"), refuse=note("refuses"), stop=note("waits"),
        close=note("closes"),
    )  # fmt: skip
    monkeypatch.setattr(FrontPlan, "front", lambda plan, server: front)
    monkeypatch.setattr(serve, "say", lambda line, *_: happened.append("says so") if "wait" in line else None)
    monkeypatch.setattr(serve.gc, "freeze", lambda: None)
    with pytest.raises(drains) if drains else nullcontext():
        serve._serve(Server(), FrontPlan(OpenaiOptions(), {}, 30), 0)
    assert happened == expected


def test_a_door_reads_prompts_that_are_too_long_for_its_server(engine_dir: Path) -> None:
    assert read_model("m", engine_dir, 77).max_len == 77 < read_model("m", engine_dir).max_len
