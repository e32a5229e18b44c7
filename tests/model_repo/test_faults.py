"""What breaks, and what comes of it: docs/serving.md has the table."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import requests
from kit.sabotage import POISON, sabotaged
from kit.served import ENVIRONMENT, SERVE, Served, descendants, until
from kit.triton_calls import joined, post, scrape
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.errors import Busy, Failed, Lost
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]  # a stream from a server that is lost may not end

# A token a step: it must outlast what happens to it.
LONG = SamplingParams(max_tokens=900, ignore_eos=True, num_drafts=0)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
# Tritonserver itself aborts if a lock of its was held by the engine that was killed.
LOST = r"(\w+: its process \d+ has ended|tritonserver ended by itself with -6)"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
KEY = {"triton-grpc-protocol-hemiola-key": "secret"}


@pytest.fixture(scope="module")
def served(engine_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines with limits of their own, that come back."""
    file = tmp_path_factory.mktemp("models") / "models.json"
    own = {"hemiola": {"max_queue": 3, "max_rows": 2, "log_requests": True}, "second": {"max_rows": 4}}
    file.write_text(json.dumps({n: {"engine_dir": str(engine_dirs[n])} | o for n, o in own.items()}))
    running = Served(
        f"--models={file}",
        "--restart=30",
        "--hang-timeout=20",  # a busy machine is no hang
        "--control-key=secret",
        "--exit-timeout=10",
        "--openai-port=0",
    )
    yield running
    assert running.end() == 0, running.said


def lost_stream(served: Served, model: str, hurt: object) -> float:
    """Seconds from the harm until all streams in flight have ended with an error.

    A stream takes 0.2 s, and we may be kept away for longer: some end before the harm, but the last ones wait
    for a row for seconds.
    """
    with Client(served.grpc_url, model, retries=0) as client:
        streams = [client.stream("in flight", LONG) for _ in range(64)]
        next(streams[0])
        hurt()
        start = time.monotonic()
        for stream in streams[:-1]:
            with contextlib.suppress(Lost):
                assert [*stream][-1].finish_reason == "length"
        with pytest.raises(Lost, match=f"the server at {served.grpc_url}: "):
            list(streams[-1])
        return time.monotonic() - start


def works_again(served: Served, llm: LLM) -> None:
    expected = llm.generate(["def "], SHORT)[0].token_ids

    def answers() -> bool:
        try:
            with Client(served.grpc_url) as client:
                return client.generate(["def "], SHORT)[0].token_ids == expected
        except (Lost, Failed, ValueError):
            return False

    until(answers)


@pytest.mark.parametrize(
    ("signal_", "whom", "message"),
    [
        (signal.SIGKILL, "models/second/", f"lost: {LOST}"),
        (signal.SIGSTOP, "models/second/", r"lost: second: its process \d+ has not moved for \d+ s"),
        (
            signal.SIGSTOP,
            "bin/tritonserver",
            r"lost: (\w+: its (tritonserver has taken no|process \d+ has not moved)|tritonserver answers)",
        ),
    ],
    ids=["engine-killed", "engine-hangs", "server-hangs"],
)
def test_streams_of_what_is_lost_end_and_it_comes_back(
    served: Served, llm: LLM, signal_: int, whom: str, message: str
) -> None:
    said = len(served.said)
    pid = served.pid(whom)
    assert lost_stream(served, "second", lambda: os.kill(pid, signal_)) < 60
    works_again(served, llm)
    assert re.search(message, served.said[said:]), served.said[said:]
    assert "starting again in" in served.said[said:]
    until(lambda: "ready again" in served.said[said:])
    page = {}
    until(lambda: page.update(scrape(served)) or any(n == "hemiola_restarts_total" for n, _ in page))
    assert max(value for (name, _), value in page.items() if name == "hemiola_restarts_total") >= 1


def test_a_grpc_request_ends_the_server_for_good_or_without_a_word(served: Served, llm: LLM) -> None:
    """tritonserver 2.51 dies of it: so that door is on loopback (test_serve.py)."""
    said = len(served.said)
    body = {"text_input": "in flight", "max_tokens": 900, "ignore_eos": True, "num_drafts": 0, "stream": True}
    url = f"{served.http_url}/v2/models/second/generate_stream"
    moving, gone = threading.Event(), threading.Event()

    def streams() -> str:
        """One after another, until one of anybody's was cut or refused: what the last one ended with."""
        end = {}
        while not gone.is_set():
            try:
                answer = requests.post(url, json=body, stream=True, timeout=300)
            except requests.ConnectionError:  # the port is closed until the server is back
                gone.set()
                break
            with answer:
                if answer.status_code != 200:
                    gone.set()
                    break
                moving.set()
                last = [line for line in answer.iter_lines() if line][-1].decode()
            end = json.loads(last.removeprefix("data: "))
            if "error" in end:
                gone.set()
            else:
                assert end["finish_reason"] == "length", end
        return end.get("error", "")

    text = InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"a"], object))
    classes = InferRequestedOutput("text_output", class_count=1)
    with ThreadPoolExecutor(16) as threads, InferenceServerClient(served.grpc_url) as theirs:
        cut = [threads.submit(streams) for _ in range(16)]
        assert moving.wait(300)
        theirs.start_stream(lambda result, error: None)
        theirs.async_stream_infer("hemiola", [text], outputs=[classes])
        ends = [stream.result() for stream in cut]
    assert any(re.match(r"tritonserver ended|\w+: its process \d+ has ended", end) for end in ends), ends
    works_again(served, llm)
    until(lambda: "ready again" in served.said[said:])
    who_saw_it = r"lost: (tritonserver ended by itself with -\d+: |\w+: its process \d+ has ended)"
    assert re.search(who_saw_it, served.said[said:]), served.said[said:]
    assert "NODELAY" not in served.said[said:], "a warning that means nothing is the reason"


def test_an_engine_whose_guard_was_killed_is_unguarded(served: Served) -> None:
    engine = served.pid("models/second/")
    for count in (1, 2):
        (guard,) = descendants(engine)
        os.kill(guard, signal.SIGKILL)
        until(lambda old=guard: (new := set(descendants(engine))) and old not in new)
        until(lambda count=count: f"watchdog process ended ({count} so far); started it again" in served.said)


def test_without_restart_a_dead_engine_ends_the_command(engine_dirs: dict[str, Path]) -> None:
    with Served(f"--engine-dir={engine_dirs['hemiola']}", "--restart=0") as alone:
        lost_stream(alone, "hemiola", lambda: os.kill(alone.pid(), signal.SIGKILL))
        status, _, _ = alone.ended()
    assert status == 1
    assert re.search(f"^error: {LOST}[^\n]*\n\\Z", alone.said, re.M), alone.said


def test_clocks_that_jump_change_nothing_and_a_step_that_raises_ends_its_requests_only(
    engine_dirs: dict[str, Path], llm: LLM, tmp_path: Path
) -> None:
    arguments = (f"--engine-dir={engine_dirs['hemiola']}", "--restart=3", "--hang-timeout=20")
    with Served(*arguments, hemiola=sabotaged(tmp_path)) as served:
        said = len(served.said)
        with Client(served.grpc_url, retries=0) as client:
            (whole,) = client.generate(["def "], LONG, timeout_s=600)
            expected = llm.generate(["def "], LONG)[0]
            assert (whole.token_ids, whole.finish_reason) == (expected.token_ids, "length")
            assert 0 < whole.metrics.time_to_first_token < 600
            (cut,) = client.generate(["def "], LONG, timeout_s=1e-6)
            assert cut.finish_reason == "timeout"
            assert served.said[said:] == "", "a jump was taken for a hang"
            reason = r"^\[INTERNAL\] the engine failed: ValueError: kernel on fire$"
            for stream in [client.stream(POISON, LONG) for _ in range(2)]:  # either may be first
                with pytest.raises(RuntimeError, match=reason):
                    list(stream)
        works_again(served, llm)
        assert re.search(r"lost: hemiola: the engine failed \(ValueError: kernel on fire\)", served.said)
        aborts = served.said.count("lost again: tritonserver did not start (it ended with -6)")  # see STARVED
        assert served.said[said:].count("starting again in") == 1 + aborts
        assert served.end() == 0


def test_a_full_queue_refuses_says_when_to_come_back_and_takes_requests_again(
    served: Served, llm: LLM
) -> None:
    def rejected() -> float:
        return scrape(served).get(key("hemiola_requests_total", outcome="rejected"), 0)

    def begin(stream: Iterator[Piece]) -> None:
        try:
            next(stream)
        except Busy as error:
            busy.append(str(error))

    def full() -> bool:
        """With eight streams more for 2 rows and 3 places, if no row ends while they begin."""
        known = len(busy)
        streams.extend(client.stream("full", LONG) for _ in range(8))
        begun = [threads.submit(begin, stream) for stream in streams[-8:]]
        until(lambda: len(busy) >= known + 3 or all(one.done() for one in begun))
        answer = requests.post(url, json={"text_input": "a", "max_tokens": 1}, timeout=60)
        for one in begun:
            one.result()
        return answer.status_code == 400 and answer.json()["error"].startswith("[OVERLOADED] ")

    url = f"{served.http_url}/v2/models/hemiola/generate"
    before = rejected()
    busy: list[str] = []
    streams: list[Iterator[Piece]] = []
    with Client(served.grpc_url, retries=0) as client, ThreadPoolExecutor(8) as threads:
        until(full)
        with Client(served.grpc_url, "second") as other:
            other.generate(["room for me"], SHORT)  # limits are each engine's own
    message = r"^5 answers are under way in 2 rows.* max_queue=3 may wait; try again in \d+ s$"
    assert busy and all(re.match(message, said) for said in busy), busy
    works_again(served, llm)
    until(lambda: rejected() >= before + 4)


def key(name: str, **labels: str) -> tuple[str, frozenset]:
    return name, frozenset(({"model": "hemiola", "version": "1"} | labels).items())


def test_models_are_controlled_over_grpc_only(served: Served) -> None:
    """Over HTTP, a load loses events of other streams."""
    for act in ("unload", "load"):
        url = f"{served.http_url}/v2/repository/models/hemiola/{act}"
        assert requests.post(url, json={}, headers={"hemiola-key": "secret"}, timeout=120).status_code == 403
    with InferenceServerClient(served.grpc_url) as nobody, pytest.raises(InferenceServerException):
        nobody.unload_model("hemiola")


def test_who_reads_the_servers_command_line_reaches_its_shared_memory(served: Served) -> None:
    """Everybody on the machine can read it."""
    server = next(iter(descendants(served.process.pid)))
    words = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    closed = next(word for word in words if word.startswith("--grpc-restricted-protocol=shared-memory"))
    key = {"triton-grpc-protocol-hemiola-key": closed.rpartition("=")[2]}
    with InferenceServerClient(served.grpc_url) as stranger, pytest.raises(InferenceServerException):
        stranger.get_system_shared_memory_status(headers=key)


def test_an_engine_is_reloaded_under_a_stream_of_another(served: Served, llm: LLM) -> None:
    with Client(served.grpc_url, "second") as other, InferenceServerClient(served.grpc_url) as control:
        stream = other.stream("neighbour", LONG)
        next(stream)
        until(lambda: key("hemiola_healthy") in scrape(served))  # comes behind the count of restarts
        num_restarts = scrape(served)[key("hemiola_restarts_total")]
        with Client(served.grpc_url) as client:
            in_flight = client.stream("def ", LONG)
            pieces = [next(in_flight)]
            try:
                control.unload_model("hemiola", headers=KEY)
                pieces += in_flight
                assert pieces[-1].finish_reason == "length", "what runs may finish"
                until(lambda: post(served, {"text_input": "a"}).status_code == 404)
                until(lambda: scrape(served)[key("hemiola_healthy")] == 0)
            finally:
                control.load_model("hemiola", headers=KEY)
        works_again(served, llm)
        until(lambda: scrape(served)[key("hemiola_healthy")] == 1)
        assert scrape(served)[key("hemiola_restarts_total")] == num_restarts, "a reload counts them again"
        assert [piece.finish_reason for piece in stream][-1] == "length"
        held = [os.readlink(fd) for fd in Path(f"/proc/{served.pid()}/fd").iterdir()]
        assert not [link for link in held if link.startswith("socket:")], "it keeps callers' connections open"
    assert "lost" not in served.said.rpartition("ready again")[2]


def test_a_timeout_ends_with_what_there_is_and_n_answers_are_those_of_n_seeds(
    served: Served, llm: LLM
) -> None:
    slow = {"text_input": "def ", "max_tokens": 900, "ignore_eos": True, "num_drafts": 0, "timeout": 1}
    answer = post(served, slow).json()
    assert answer["finish_reason"] == "timeout" and answer["num_output_tokens"] < 900
    told = llm.generate(["def "], LONG)[0].token_ids
    ids = (
        answer["output_ids"] if answer["num_output_tokens"] > 1 else [answer["output_ids"]]
    )  # as Triton does
    assert ids == told[: len(ids)]
    body = {"text_input": "def ", "max_tokens": 6, "ignore_eos": True, "temperature": 0.9, "seed": 7, "n": 3}
    answer = post(served, body | {"return_log_probs": True, "exclude_input_in_output": False}).json()
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, seed=7 + i, logprobs=0)
        for i in range(3)
    ]
    outs = llm.generate(["def "] * 3, params)
    assert answer["output_ids"] == [i for out in outs for i in out.token_ids]
    assert answer["text_output"] == ["def " + out.text for out in outs]
    assert (answer["num_output_tokens"], answer["finish_reason"]) == ([6] * 3, ["length"] * 3)
    expected = [entry.logprob for out in outs for entry in out.logprobs]
    assert answer["output_log_probs"] == pytest.approx(expected, rel=1e-6)
    assert answer["cum_log_probs"] == pytest.approx([sum(expected[i : i + 6]) for i in (0, 6, 12)], rel=1e-6)


def test_a_log_line_per_request_holds_no_text(served: Served) -> None:
    post(served, {"text_input": "top secret", "max_tokens": 3, "ignore_eos": True, "id": "mine"})
    until(lambda: "request 'mine': success, " in served.said)
    assert "3 out (length)" in served.said and "secret" not in served.said.replace("hemiola-key", "")


def test_a_log_whose_disk_is_full_stops_nobody(engine_dirs: dict[str, Path], llm: LLM) -> None:
    """Tritonserver says some 20 KB about a request, and a pipe holds 64, or 1,000."""
    arguments = (f"--engine-dir={engine_dirs['hemiola']}", "--log-verbose", "--log-requests")
    with open("/dev/full", "w") as full:
        served = Served(*arguments, log=full.fileno())
    with served:
        prompts = ["def "] * 80
        expected = llm.generate(prompts[:1], SHORT)[0].token_ids
        with Client(served.grpc_url) as client:
            outs = client.generate(prompts, SHORT, timeout_s=300)
        assert [out.token_ids for out in outs] == [expected] * 80
        works_again(served, llm)
        assert served.end() == 0


def sent(address: tuple[str, int], head: bytes, chunk: bytes, num_chunks: int, tail: bytes = b"") -> bytes:
    """Sends so much, unless the connection is closed, and returns the first line of the answer."""
    with socket.create_connection(address, timeout=5) as connection, contextlib.suppress(OSError):
        connection.sendall(head)
        with contextlib.suppress(OSError):
            for _ in range(num_chunks):
                connection.sendall(chunk)
            connection.sendall(tail)
        return connection.recv(1000).partition(b"\r\n")[0]
    return b""


def grpc_flood(served: Served, headers: Mapping[str, str], text: str) -> str:
    request = InferInput("text_input", [1], "BYTES")
    request.set_data_from_numpy(np.array([text.encode()], object))
    answers: SimpleQueue = SimpleQueue()
    with InferenceServerClient(served.grpc_url) as theirs:
        theirs.start_stream(lambda result, error: answers.put(error), headers=dict(headers))
        with contextlib.suppress(InferenceServerException):  # the callback hears of it, too
            theirs.async_stream_infer("hemiola", [request])
        error = answers.get(timeout=120)
    return str(error)


@pytest.mark.parametrize("door", ["http", "grpc", "metrics", "openai"])
def test_half_open_connections_and_floods_stop_nobody_else(served: Served, llm: LLM, door: str) -> None:
    host, port = getattr(served, f"{door}_url").removeprefix("http://").partition("/")[0].split(":")
    address = host, int(port)
    path = {"openai": b"/v1/completions", "metrics": b"/metrics"}.get(door, b"/v2/models/hemiola/generate")
    opening = b"POST %s HTTP/1.1\r\nHost: a\r\n" % path
    half_open = [socket.create_connection(address) for _ in range(60)]
    for i, begun in enumerate((opening, opening + b"Content-Length: 100\r\n\r\n{", PREFACE)):
        for connection in half_open[i::4]:  # the fourth says nothing
            connection.sendall(begun)
    said = sent(address, opening, b"x-header: %s\r\n" % (b"y" * 1000), 20_000)
    assert b" 200 " not in said
    if door == "grpc":
        assert "metadata" in grpc_flood(served, {"x-header": "y" * 1_000_000}, "a")
        assert "text_input has" in grpc_flood(served, {}, "a" * (80 << 20))
        sent(address, PREFACE, b"\xff" * 1000, 20_000)
    else:
        body = b'{"model": "hemiola", "prompt": "', b'"}'
        if door == "http":
            body = b'{"text_input": "', b'"}'
        opening += b"Content-Length: %d\r\n\r\n%s" % ((80 << 20) + sum(map(len, body)), body[0])
        said = sent(address, opening, b"a" * (1 << 20), 80, body[1])
        assert re.match(rb"HTTP/1\.1 4\d\d |$", said), said
    works_again(served, llm)
    assert scrape(served) and requests.get(f"{served.openai_url}/models", timeout=30).status_code == 200
    for connection in half_open:
        connection.close()


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(served: Served, llm: LLM) -> None:
    with Client(served.grpc_url) as client:
        slow = client.stream("def ", LONG)
        first = next(slow)
        time.sleep(2)  # reads nothing while the engine writes
        works_again(served, llm)
        assert joined([first, *slow])[0] == llm.generate(["def "], LONG)[0].token_ids


def test_a_second_server_on_the_same_ports_is_refused_and_the_first_serves_on(
    served: Served, llm: LLM, engine_dirs: dict[str, Path]
) -> None:
    port = served.http_url.rpartition(":")[2]
    command = [*SERVE, f"--engine-dir={engine_dirs['hemiola']}", f"--http-port={port}"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and f"http port {port} on 127.0.0.1 cannot be used" in ended.stderr
    works_again(served, llm)


def test_many_callers_at_a_full_queue_all_get_their_answers_by_trying_again(served: Served, llm: LLM) -> None:
    expected, before = llm.generate(["def "], SHORT)[0].token_ids, threading.active_count()
    with Client(served.grpc_url, retries=20) as client, ThreadPoolExecutor(16) as threads:
        outs = list(threads.map(lambda _: client.generate(["def "], SHORT)[0].token_ids, range(32)))
    assert outs == [expected] * 32
    assert threading.active_count() < before + 40
