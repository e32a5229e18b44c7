"""How the front ends: it refuses at once, streams that it cuts say why, and nobody holds it up."""

import http.client
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from kit.scripted_triton import ScriptedTriton, script
from kit.served import until

from hemiola.runtime.serving import slow_reader, wire
from hemiola.runtime.serving.openai import app, body, readers
from hemiola.runtime.serving.openai.front import Front

ASKED = {"model": "tiny", "prompt": "x"}
FOREVER_S = 1e6


def stopped(front: Front) -> None:
    """Within the tests' own limit."""
    ending = threading.Thread(target=front.stop, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()


@pytest.mark.parametrize("route", ["/health", "/v1/models", "/metrics", "/version"])
def test_the_first_probe_behind_sigterm_finds_it_ready(start: Callable[..., Front], route: str) -> None:
    """Its loop is busy, and comes to know of the end later than it has taken the connection."""
    front = start()
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as probe:
        probe.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert probe.recv(2**16).startswith(b"HTTP/1.1 200 ")
        held, gate = threading.Event(), threading.Event()
        front._loop.call_soon_threadsafe(lambda: held.set() or gate.wait(60))
        assert held.wait(60)
        probe.sendall(f"GET {route} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        front.refuse()
        gate.set()
        answer = http.client.HTTPResponse(probe)
        answer.begin()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["code"] == "server_ends"


def test_a_kept_connection_brings_new_requests_to_a_server_that_ends(
    start: Callable[..., Front], triton: ScriptedTriton
) -> None:
    triton.script = script("a", "b")
    triton.gate.clear()
    front = start(exit_timeout_s=60)
    begun = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    begun.putrequest("POST", "/v1/completions")
    begun.putheader("Content-Length", "40")
    begun.endheaders()  # its body comes later
    kept = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    kept.request("GET", "/version")
    kept.getresponse().read()
    with requests.post(f"{front.url}/completions", json=ASKED | {"stream": True}, stream=True) as stream:
        events = stream.iter_lines()
        next(events)
        front.refuse()
        kept.request("POST", "/v1/completions", json.dumps(ASKED))
        answer = kept.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (503, "close")
        begun.send(json.dumps(ASKED).ljust(40).encode())
        assert begun.getresponse().status == 503
        triton.gate.set()
        assert [line for line in events if line][-1] == b"data: [DONE]"
    stopped(front)
    assert len(triton.requests) == 1
    begun.close()
    kept.close()


@pytest.mark.parametrize("reason", ["", "tritonserver burns"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["completions", "responses"])
def test_an_answer_that_the_end_cuts_does_not_say_so(
    start: Callable[..., Front], triton: ScriptedTriton, stream: bool, reason: str, route: str
) -> None:
    triton.script = script("a", "b")
    triton.gate.clear()
    front = start(exit_timeout_s=FOREVER_S if reason else 0.1)
    asked = {"model": "tiny", "stream": stream, "prompt" if route == "completions" else "input": "x"}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(requests.post, f"{front.url}/{route}", json=asked, timeout=60)
        until(lambda: triton.requests)
        if reason:
            front.close(reason)
        else:
            stopped(front)
    said = answer.result()
    expected = reason or "this answer did not end within 0.1 s (--exit-timeout)"
    if stream and said.status_code == 200:  # not if it ended before the first token came
        last = said.text.removesuffix("\n\n").rpartition("data: ")[2]
        found = json.loads(last)
        error = found["response"]["error"] if route == "responses" else found["error"]
    else:
        assert said.status_code == 503
        error = said.json()["error"]
    assert expected in error["message"]


def test_a_body_that_is_being_read_when_the_front_closes_gets_no_answer(
    start: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a second signal."""
    reading, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(app, "prepare", lambda *_: reading.set() or gate.wait(60))
    front = start(exit_timeout_s=FOREVER_S)
    with ThreadPoolExecutor(1) as threads:
        asked = ASKED | {"prompt": "x" * 2 * readers.SMALL}
        answer = threads.submit(requests.post, f"{front.url}/completions", json=asked, timeout=60)
        assert reading.wait(60)
        front.close("the server burns")
        gate.set()
    said = answer.result()
    assert said.status_code == 503 and said.json()["error"]["message"] == "the server burns"


def test_a_server_that_is_lost_is_named_by_its_socket(
    start: Callable[..., Front], triton: ScriptedTriton
) -> None:
    triton.script = script("a", "b")
    triton.gate.clear()
    front = start()
    with requests.post(f"{front.url}/completions", json=ASKED | {"stream": True}, stream=True) as stream:
        events = stream.iter_lines()
        next(events)
        front.reason = "the engine burns"
        triton.__exit__()
        triton.gate.set()
        last = [line for line in events if line][-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the engine burns"


def test_who_reads_or_sends_nothing_holds_the_end_up(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that reads nothing, one whose body does not come, and a tritonserver that hangs."""
    monkeypatch.setattr(slow_reader, "WRITE_TIMEOUT_S", FOREVER_S)
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", FOREVER_S)
    monkeypatch.setattr(wire, "CANCEL_TIMEOUT_S", FOREVER_S)
    triton.script = script("x" * 10_000_000, "b")
    triton.gate.clear()
    front = start(exit_timeout_s=0.1)
    sent = json.dumps(ASKED | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", front.port)) as reads_nothing,
        socket.create_connection(("127.0.0.1", front.port)) as sends_nothing,
    ):
        reads_nothing.sendall(head % len(sent) + sent)
        sends_nothing.sendall(head % 1000 + b"{")
        until(lambda: triton.requests)
        assert reads_nothing.recv(100)
        stopped(front)
    triton.gate.set()


def test_a_body_that_does_not_come_is_an_answer_under_way(start: Callable[..., Front]) -> None:
    front = start(exit_timeout_s=FOREVER_S)
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as trickles:
        trickles.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        requests.get(f"{front.url}/models", timeout=60)
        stopped(front)
