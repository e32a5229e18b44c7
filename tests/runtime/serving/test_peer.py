"""Prefixes over NIXL: between processes on this machine, and from peers that are none."""

import base64
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from kit.peers import echo

from hemiola import LLM, Lost, Refused, SamplingParams
from hemiola.runtime.serving import peer as peers
from hemiola.runtime.serving.peer import Peer

pytest.importorskip("nixl", reason="nixl is not installed: pip install -e '.[nixl]'")
TESTS = Path(__file__).parents[2]
Start = Callable[..., tuple[subprocess.Popen, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A replica in a process (kit/peers.py), and its address."""
    started: list[subprocess.Popen] = []

    def run(*arguments: object, **environment: str) -> tuple[subprocess.Popen, str]:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "kit.peers", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path} | environment, **pipes)
        started.append(process)
        address = process.stdout.readline().strip()
        assert address.startswith("127.0.0.1:"), f"it printed {address!r}"
        return process, address

    yield run
    for process in started:
        process.communicate()


@pytest.fixture
def own() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@pytest.mark.parametrize("transport", ["all", "tcp"])
def test_bytes_of_another_process_are_equal(
    start: Start, own: Peer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    _, address = start("echo", UCX_TLS=transport)
    monkeypatch.setattr(peers, "PIECE", 100_000)
    for prompt, salt in (([1], ""), ([100_000, 5], "a"), ([1_234_567, 8], ""), ([99, 1], "b")):
        assert own.fetch(address, prompt, salt) == echo(prompt, cache_salt=salt)
    with pytest.raises(Refused, match="nothing is stored") as refused:
        own.fetch(address, [0])
    assert refused.value.code == "not_found"


def test_a_fetch_that_ends_loses_others_the_agent_of_their_peer(start: Start, own: Peer) -> None:
    """Several at once from one peer."""
    _, address = start("echo")

    def fetch(number: int) -> bool:
        return own.fetch(address, [300_000 + number]) == echo([300_000 + number])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(fetch, range(24)))


def test_each_fetch_takes_a_descriptor_for_ever(
    start: Start, own: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends: after a thousand requests no worker could open another."""
    monkeypatch.setattr(peers, "MOST_FETCHES", 4, raising=False)
    process, address = start("echo")
    counts: dict[int | str, list[int]] = {"self": [], process.pid: []}
    for number in range(24):
        own.fetch(address, [number + 1])
        for pid, counted in counts.items():
            counted.append(len(os.listdir(f"/proc/{pid}/fd")))
    few = 4  # of requests whose threads are about to end
    assert all(max(counted[12:]) <= max(counted[:12]) + few for counted in counts.values()), counts


def test_an_answer_from_a_fetched_prefix_is_the_plain_runs(
    start: Start, own: Peer, engine_dir: Path, tiny_engine: Callable[..., Path]
) -> None:
    _, address = start("engine", engine_dir)
    prompt, params = list(range(2, 100)), SamplingParams(max_tokens=12, logprobs=2)
    with LLM(engine_dir, drafts="none", prefix_cache=False) as plain:
        wanted = plain.generate([prompt], params)[0]
    packed = own.fetch(address, prompt)
    with LLM(engine_dir, host_cache_bytes=2**24) as llm:
        assert llm.import_prefix(packed) == 96
        out = llm.generate([prompt], params)[0]
    assert out.metrics.cached_tokens == 96
    assert (out.token_ids, out.logprobs) == (wanted.token_ids, wanted.logprobs)
    with LLM(tiny_engine("nemotron_h_moe"), host_cache_bytes=2**24) as another:
        with pytest.raises(Refused, match="packed has engine ") as refused:
            another.import_prefix(packed)
        assert refused.value.code == "conflict" and "\n" not in str(refused.value)


def test_a_peer_that_dies_before_it_is_read_is_lost(
    start: Start, own: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, address = start("dies")
    add = own._agent.add_remote_agent
    monkeypatch.setattr(own._agent, "add_remote_agent", lambda given: (process.wait(), add(given))[1])
    with pytest.raises(Lost, match=f"the peer {address} is gone") as lost:
        own.fetch(address, [1_000_000])
    assert "\n" not in str(lost.value)
    monkeypatch.undo()
    with pytest.raises(Lost, match="is gone"):
        own.fetch(address, [1])
    _, address = start("echo")
    assert own.fetch(address, [77]) == echo([77])


def said(**answer: object) -> bytes:
    good = {"agent": base64.b64encode(b"nixl").decode(), "place": 4096, "size": 100}
    return json.dumps(good | answer).encode() + b"\n"


WRONG = {
    "nothing": (b"", Lost, "has no end"),
    "half a line": (b'{"agent": ', Lost, "has no end"),
    "silence": (None, Lost, "does not answer"),
    "another program": (b"HTTP/1.1 400 Bad Request\r\n", Refused, "answers b'HTTP/1.1 400"),
    "bytes": (b"\xff\xfe\n", Refused, "another program"),
    "a list": (b"[1]\n", Refused, "another program"),
    "deep JSON": (b"[" * 10**5 + b"\n", Refused, "another program"),
    "no size": (b'{"agent": "", "place": 1}\n', Refused, "another program"),
    "an agent that is none": (said(), Refused, "NIXL cannot read its agent"),
    "an agent of no base64": (said(agent="*"), Refused, "another program"),
    "size 0": (said(size=0), Refused, "0 bytes at 4096"),
    "size 2**60": (said(size=2**60), Refused, "bytes at 4096"),
    "a size of text": (said(size="1"), Refused, "'1' bytes"),
    "a place below 0": (said(place=-1), Refused, "bytes at -1"),
    "a refusal of an unknown kind": (b'{"refused": "no\\nno", "code": 7}\n', Refused, "no no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_peer_that_sends_garbage_is_refused_in_a_line(own: Peer, name: str) -> None:
    answer, kind, match = WRONG[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(2**16)
                if answer is None:
                    connection.recv(1)  # until who asked has gone
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(kind, match=match) as refused:
            own.fetch(f"127.0.0.1:{listener.getsockname()[1]}", [1], timeout_s=0.2 if answer is None else 60)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
        thread.join()


def test_an_agent_that_has_other_memory_than_it_says_is_lost(own: Peer) -> None:
    """Its metadata is NIXL's, and covers nothing at that place."""
    with Peer(echo) as other, socket.create_server(("127.0.0.1", 0)) as listener:
        agent = base64.b64encode(other._agent.get_agent_metadata()).decode()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(said(agent=agent))
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Lost, match="is gone"):
            own.fetch(f"127.0.0.1:{listener.getsockname()[1]}", [1])
        thread.join()


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"[]\n", b'{"prompt": [1.5], "cache_salt": ""}\n', b"[" * 10**5 + b"\n"]
)
def test_a_request_that_is_none_is_refused(own: Peer, line: bytes) -> None:
    with Peer(echo) as other:
        host, port = other.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(line)
            assert json.loads(connection.makefile().readline())["code"] == "malformed"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b'{"prompt": ')  # and goes
        assert own.fetch(other.address, [5]) == echo([5])


def test_addresses_and_ports_that_cannot_be_are_refused(own: Peer) -> None:
    for address in ("", "host", "127.0.0.1:", "127.0.0.1:99999", ":1"):
        with pytest.raises(Refused, match="give HOST:PORT"):
            own.fetch(address, [1])
    with Peer(echo) as other:
        with pytest.raises(Refused, match="cannot listen on") as refused:
            Peer(echo, port=int(other.address.split(":")[1]))
        assert (refused.value.code, refused.value.field) == ("in_use", "port")
    with pytest.raises(Lost, match="is gone"):
        own.fetch(other.address, [1])


def test_a_peer_without_descriptors_writes_a_line_for_each_try(
    own: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PAUSE", 0)
    tries = []

    class Full:
        def accept(self) -> None:
            tries.append(1)
            own._closing = len(tries) == 5
            raise OSError(errno.EMFILE, "Too many open files")

    own._accept(Full(), echo)  # type: ignore[arg-type]
    assert len(tries) == 5 and caplog.text.count("peers cannot be let in") == 1
