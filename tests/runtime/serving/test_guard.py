"""The HTTP doors before a server that a test has written."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kit.served import until

from hemiola.runtime.serving import ending, files, slow_reader
from hemiola.runtime.serving import guard as guards
from hemiola.runtime.serving.door import TURNED_AWAY
from hemiola.runtime.serving.guard import Guard
from hemiola.runtime.serving.http_request import (
    IN_A_TURN,
    MOST_CHUNKS,
    MOST_EMPTY,
    Refusal,
    RequestHead,
    read_body,
)
from hemiola.runtime.serving.ports import ANY_PORTS
from hemiola.runtime.serving.relay import Passed, Unchunked

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


POST = b"POST /x HTTP/1.1\r\n"


class Upstream:
    """Remembers what it was asked, and answers `answer`; with `endless`, again and again."""

    def __init__(self, path: Path) -> None:
        self.asked: list[bytes] = []
        self.answer = ANSWER
        self.gate = threading.Event()  # before it closes the connection
        self.gate.set()
        self.endless = False
        self.num_sent = self.num_left = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(100)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=self._listener.accept()[:1], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        said = b""
        with connection, contextlib.suppress(OSError):
            while b"\r\n\r\n" not in said:
                said += connection.recv(2**16)
            head, _, body = said.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            while len(body) < length:
                body += connection.recv(2**16)
            self.asked.append(head + b"\r\n\r\n" + body)
            connection.sendall(self.answer)
            self.gate.wait(60)
            while self.endless:
                connection.sendall(b"x" * 2**16)
                self.num_sent += 2**16
        self.num_left += 1

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    made = Upstream(Path("upstream"))
    yield made
    made.close()


@pytest.fixture
def guard(upstream: Upstream) -> Iterator[Guard]:
    made = Guard("127.0.0.1", ANY_PORTS, "SECRET")
    made.start({"http": Path("upstream"), "metrics": Path("nowhere")})
    yield made
    made.close()


def said(guard: Guard, request: bytes, door: str = "http") -> bytes:
    with socket.create_connection(("127.0.0.1", guard.ports[door]), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def request(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def test_dear_bodies_hold_up_those_that_a_thread_reads(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for one process; threads are few."""
    gate, waiting = threading.Event(), []

    def run(*_: object) -> None:
        waiting.append(True)
        gate.wait(60)

    monkeypatch.setattr(guard._aside, "run", run)
    dear = b'"' + b"{" * 5000 + b'"'
    threads = [threading.Thread(target=said, args=(guard, request(dear)), daemon=True) for _ in range(40)]
    for thread in threads:
        thread.start()
    until(lambda: bool(waiting))
    assert said(guard, request(b'"' + b"x" * 2**17 + b'"')) == ANSWER
    gate.set()
    for thread in threads:
        thread.join(60)


def test_a_request_that_no_thread_can_read_has_no_answer(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its traceback fills the log."""

    def start_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guards.asyncio, "to_thread", start_thread)
    answer = said(guard, request(b'"' + b"x" * 2**17 + b'"'))
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n") and b"send it again" in answer
    until(lambda: guard._num_open == 0)
    assert [record.getMessage() for record in caplog.records] == [
        "a request failed: RuntimeError: can't start new thread"
    ]
    assert said(guard, request(b"{}")) == ANSWER


def test_a_form_body_reaches_the_parser_of_forms(guard: Guard, upstream: Upstream) -> None:
    form = b"Content-Type: application/x-www-form-urlencoded\r\nX-Own: 1\r\nhemiola-arrival: SECRET 1.0\r\n"
    for framing in (
        b"Content-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x\r\n}\r\n0\r\n\r\n",
    ):
        assert said(guard, b"POST /x HTTP/1.1\r\nHost: a\r\n" + form + framing) == ANSWER
        head, _, body = upstream.asked.pop().partition(b"\r\n\r\n")
        *lines, connection, mark, kind, length = head.split(b"\r\n")
        assert lines == [b"POST /x HTTP/1.1", b"Host: a", b"X-Own: 1"]
        assert connection == b"Connection: close"
        assert mark.startswith(b"hemiola-arrival: SECRET ") and mark != b"hemiola-arrival: SECRET 1.0"
        assert (kind, length, body) == (b"Content-Type: application/json", b"Content-Length: 2", b"{}")


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (413, b"Content-Length: 99999999\r\n\r\n"),
        (413, b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b"a" * 2**20 + b"\r\n") * 17),
        (400, b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
        (400, b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
        (400, b"Content-Length: -1\r\n\r\n"),
        (400, b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (400, b"Transfer-Encoding: chunked\r\n\r\n0x1\r\n{\r\n0\r\n\r\n"),
        (400, b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n"),
        (400, b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 200),
        (400, b"X-A: 1\nContent-Length: 3\r\n\r\n"),
        (400, b"X-A : 1\r\n\r\n"),
        (400, b"Content-Length: 2000\r\n\r\n" + b"[" * 2000),
        (400, b"X-A: \0\r\n\r\n"),
        (400, b'Content-Length: 25\r\n\r\n{"timeout":1,"timeout":2}'),
        (400, b'Content-Length: 19\r\n\r\n{"a":1,"\\u0061":2 }'),
        (431, b"X-A: %s\r\n\r\n" % (b"a" * 2**17)),
        (431, b"X-A: %s\r\n\r\n" % (b"a" * 9000)),
        (431, b"X-A: %s\r\n" % (b"a" * 7000) * 10 + b"\r\n"),
    ],
)
def test_what_is_no_plain_request_goes_on(
    guard: Guard, upstream: Upstream, status: int, request_: bytes
) -> None:
    found = said(guard, b"POST /x HTTP/1.1\r\nHost: a\r\n" + request_)
    assert found.startswith(b"HTTP/1.1 %d " % status), found
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]
    assert not upstream.asked


def test_chunks_of_one_byte_hold_up_all_answers() -> None:
    """All that had arrived were read in one turn of the loop: 20,000 in 0.7 s."""

    async def turns(num_chunks: int) -> int:
        reader, num_turns = asyncio.StreamReader(), 0
        reader.feed_data(b"1\r\n \r\n" * num_chunks + b"0\r\n\r\n")
        head = RequestHead(b"", [], None, False)

        async def read() -> int:
            return len([piece async for piece in read_body(head, reader)])

        reading = asyncio.create_task(read())
        while not reading.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert reading.result() == num_chunks
        return num_turns

    assert asyncio.run(turns(10_000)) >= 10_000 // IN_A_TURN
    assert asyncio.run(turns(MOST_CHUNKS))
    with pytest.raises(Refusal, match="send larger ones"):
        asyncio.run(turns(MOST_CHUNKS + 1))


def test_a_body_of_the_largest_size_is_too_large(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "MAX_BODY", 100)
    for size, status in ((100, b"200"), (101, b"413")):
        body = b"{%b}" % (b" " * (size - 2))
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
        plain = b"Content-Length: %d\r\n\r\n%b" % (size, body)
        for framed in (plain, b"Transfer-Encoding: chunked\r\n\r\n" + chunk):
            assert said(guard, POST + framed).startswith(b"HTTP/1.1 " + status), (size, framed)


GET = b"GET /x HTTP/1.1"


@pytest.mark.parametrize(
    ("status", "first_line"),
    [
        (400, b"GET /x"),
        (400, b"GET /x HTTP/2.0"),
        (400, b"GET /x HTTX/1.1"),
        (400, b"GET x HTTP/1.1"),
        (400, b"GET  /x HTTP/1.1"),
        (400, b"GET\t/x HTTP/1.1"),
        (400, b"get /x HTTP/1.1"),
        (400, b"GET /x\0 HTTP/1.1"),
        (400, b"CONNECT a:80 HTTP/1.1"),
        (400, b"CONNECT /x HTTP/1.1"),
        (400, b"OPTIONS * HTTP/1.1"),
        (400, b"\x16\x03\x01\0\xa5"),
        (400, b" "),
        (414, b"GET /x?%s HTTP/1.1" % (b"a" * 9000)),
        (414, b"GET /x?%s HTTP/1.1" % (b"a" * 60_000)),
        (414, b"GET /x?%s HTTP/1.1" % (b"a" * 10_000_000)),
        (200, b"GET http://127.0.0.1:8000/x HTTP/1.1"),
        (200, b"GET /x HTTP/1.0"),
        (200, "GET /ä HTTP/1.1".encode()),
        (200, b"\r\n" + GET),
        (200, b"\r\n\r\n" + GET),
        (200, b"\r\n" * MOST_EMPTY + GET),
        (400, b"\r\n" * (MOST_EMPTY + 1) + GET),
    ],
)
def test_a_first_line_that_is_no_http_gets_no_answer(
    guard: Guard, upstream: Upstream, status: int, first_line: bytes
) -> None:
    found = said(guard, first_line + b"\r\nHost: a\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 %d " % status), found
    assert bool(upstream.asked) == (status == 200)
    if status != 200:
        assert "\n" not in json.loads(found.partition(b"\r\n\r\n")[2])["error"]


def test_a_connection_that_is_taken_while_the_door_ends_is_never_closed(guard: Guard) -> None:
    """Nobody knew of it, and its socket went with the next garbage collection: minutes later."""
    gc.disable()
    try:
        guard._loop.call_soon_threadsafe(time.sleep, 0.3)  # meanwhile the kernel has connections for us
        callers = [socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=10) for _ in range(8)]
        guard.close("tritonserver burns")
        for caller in callers:
            with caller, contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
    finally:
        gc.enable()


@pytest.mark.parametrize("begun", [GET + b"\n", GET + b"\nX: y\r\n\r\n", GET + b"\r\nX: y\n", b"\n" + GET])
def test_a_line_that_ends_in_a_bare_lf_is_taken_for_the_beginning_of_another(
    guard: Guard, upstream: Upstream, begun: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as connection:
        connection.sendall(begun)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
    assert not upstream.asked


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"zstd", b"x-gzip", b"gzip, identity", b"nonsense"])
def test_a_compressed_body_is_not_told_what_to_send(guard: Guard, upstream: Upstream, coding: bytes) -> None:
    found = said(guard, POST + b"Content-Encoding: %s\r\nContent-Length: 2\r\n\r\n{}" % coding)
    assert found.startswith(b"HTTP/1.1 415 ") and b"\r\nAccept-Encoding: identity\r\n" in found
    assert coding.decode() in json.loads(found.partition(b"\r\n\r\n")[2])["error"]
    twice = b"Content-Encoding: %s\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}" % coding
    assert said(guard, POST + twice).startswith(b"HTTP/1.1 400 ")
    assert not upstream.asked


def test_an_answer_without_a_byte_is_passed_on(
    guard: Guard, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.answer = b""
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as connection:
        connection.sendall(GET + b"\r\n\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 502 ")
    guard.close()  # every connection has ended
    assert not caplog.records, "a caller writes tracebacks into the log"


@pytest.mark.parametrize(
    "authority", [b"http://a", b"https://a:b@c:99999", b"http://[::1]:1", b"http://a_b", b"http://?"]
)
def test_tritonserver_reads_the_host_of_a_first_line(
    guard: Guard, upstream: Upstream, authority: bytes
) -> None:
    """Of many it closes the connection without an answer."""
    assert said(guard, b"GET " + authority + b"/x?y=http://z/ HTTP/1.0\r\n\r\n") == ANSWER
    assert upstream.asked[0].startswith(b"GET /x?y=http://z/ HTTP/1.0\r\n")


def test_a_request_that_ends_before_it_is_whole_gets_no_answer(guard: Guard) -> None:
    for begun in (GET, GET + b"\r\nHost: a\r\n", POST + b"Content-Length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as connection:
            connection.sendall(begun)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"a\r\ndata: {}\n\n\r\n"


def events_of(answer: bytes) -> list[bytes]:
    """Of a chunked stream that is whole."""
    body, events = answer.partition(b"\r\n\r\n")[2], b""
    while True:
        length, _, body = body.partition(b"\r\n")
        if not int(length, 16):
            assert body == b"\r\n"
            return [event.removeprefix(b"data: ") for event in events.split(b"\n\n")[:-1]]
        events, body = events + body[: int(length, 16)], body[int(length, 16) :].removeprefix(b"\r\n")


@pytest.mark.parametrize("passed", [EVENTS, EVENTS + EVENT, EVENTS + EVENT * 3])
@pytest.mark.parametrize("reason", ["", "not ended within 30 s"])
def test_a_stream_that_tritonserver_cuts_ends_without_an_error(
    guard: Guard, upstream: Upstream, passed: bytes, reason: str
) -> None:
    upstream.answer = passed
    upstream.gate.clear()
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as connection:
        connection.sendall(GET + b"\r\n\r\n")
        found = connection.recv(1)
        guard.reason = reason
        upstream.gate.set()
        found += b"".join(iter(lambda: connection.recv(2**16), b""))
    *whole, last = events_of(found)
    assert whole == [b"{}"] * passed.count(b"data")
    assert (reason or "tritonserver ended") in json.loads(last)["error"]


OLD_GET = b"GET /x HTTP/1.0\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_an_answer_to_head_is_a_refusal_or_has_a_body(guard: Guard, upstream: Upstream) -> None:
    """Of which its connection's next reader would know nothing; tritonserver has no HEAD."""
    assert said(guard, b"HEAD /x HTTP/1.1\r\nA: b\r\n\r\n") == ANSWER.removesuffix(b"ok")
    assert upstream.asked[0].startswith(b"GET /x HTTP/1.1\r\nA: b\r\n")
    refused = said(guard, b"HEAD /x HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 413 ") and refused.endswith(b"\r\n\r\n")


def test_a_client_of_http_1_0_gets_chunks_which_it_does_not_know(guard: Guard, upstream: Upstream) -> None:
    upstream.answer = EVENTS + EVENT * 3 + b"1;x\r\n\r\r\n" + b"40000\r\n" + b"y" * 2**18 + b"\r\n0\r\n\r\n"
    assert said(guard, OLD_GET) == PLAIN + b"data: {}\n\n" * 3 + b"\r" + b"y" * 2**18
    upstream.answer = ANSWER
    assert said(guard, OLD_GET) == ANSWER
    upstream.answer = EVENTS + EVENT
    answer = said(guard, OLD_GET)
    assert answer.startswith(PLAIN + b"data: {}\n\ndata: ")
    assert "tritonserver ended" in json.loads(answer.removeprefix(PLAIN).split(b"data: ")[2])["error"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_chunks_that_arrive_in_parts_are_lost(size: int) -> None:
    answer = EVENTS.replace(b"Transfer-Encoding: chunked", b"transfer-encoding:  Chunked") + EVENT * 3
    unchunked, whole = Unchunked(), answer + b"0\r\n\r\n"
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert b"".join(map(unchunked.take, parts)) == PLAIN + b"data: {}\n\n" * 3


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_an_answer_that_arrives_in_parts_is_cut_though_it_is_whole(size: int) -> None:
    for whole, is_cut in ((EVENTS + EVENT * 3, True), (EVENTS + EVENT * 3 + b"0\r\n\r\n", False)):
        passed = Passed()
        for at in range(0, len(whole), size):
            passed.add(whole[at : at + size])
        assert passed.is_cut_stream == is_cut


@pytest.mark.parametrize(
    "passed", [EVENTS + EVENT + b"0\r\n\r\n", EVENTS + EVENT[:-6], ANSWER.replace(b": 2", b": 9")]
)
def test_an_answer_that_is_whole_or_cut_within_an_event_gets_one_more(
    guard: Guard, upstream: Upstream, passed: bytes
) -> None:
    upstream.answer = passed
    assert said(guard, GET + b"\r\n\r\n") == passed


@pytest.mark.parametrize(
    "begun", [b"", b"POST /x HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_client_that_trickles_stays_for_ever(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(guards, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(guards, "BODY_TIMEOUT_S", 0.1)
    assert said(guard, begun).startswith(b"HTTP/1.1 408 ")


def test_a_body_of_another_type_is_answered_by_tritonserver(guard: Guard, upstream: Upstream) -> None:
    body = b'{"max_tokens": "2"}'
    head = b"POST /v2/models/m/generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = said(guard, head + body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert error == {"error": "[INVALID_ARG] max_tokens is '2'; give a whole number"}
    assert not upstream.asked


def test_reading_a_large_body_holds_up_all_answers(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    monkeypatch.setattr(guards, "check_content", lambda *_: threads.append(threading.current_thread().name))
    for size in (10, guards.SMALL_BODY + 1):
        assert said(guard, POST + b"Content-Length: %d\r\n\r\n" % size + b" " * size) == ANSWER
    assert threads[0] == "http-guard" != threads[1]


def test_idle_connections_take_all_files_of_the_launcher(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then could not read its engines' heartbeats, and ended the server."""
    monkeypatch.setattr(files, "most_connections", lambda: 8)
    guard = Guard("127.0.0.1", ANY_PORTS)
    guard.start({"http": Path("upstream"), "metrics": Path("nowhere")})
    with contextlib.closing(guard), contextlib.ExitStack() as stack:
        idle = []
        for number in range(8):
            port = guard.ports["http" if number % 2 else "metrics"]
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            until(lambda: guard._num_open == len(idle))
        for _ in range(20):
            assert said(guard, b"") == TURNED_AWAY
        assert guard._num_open == 8
        idle.pop().close()
        until(lambda: guard._num_open == 7)
        assert said(guard, b"GET /x HTTP/1.1\r\n\r\n") == ANSWER


def test_a_reader_that_is_dead_holds_a_growing_buffer(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_reader, "WRITE_TIMEOUT_S", 1.0)
    upstream.endless = True
    with socket.create_connection(("127.0.0.1", guard.ports["http"])) as dead:
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        dead.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        until(lambda: upstream.num_left)
    assert upstream.num_sent < 64 * 2**20
    until(lambda: not guard._answering)  # it leaves the upstream first


def test_a_reader_that_read_once_or_has_little_more_to_read_is_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = iter([20, 10])
    monkeypatch.setattr(slow_reader, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(slow_reader, "_unread", lambda _: next(held, 10))

    async def write() -> None:
        async with slow_reader.writing(None):
            await asyncio.sleep(60)

    with pytest.raises(ConnectionResetError, match="read nothing"):
        asyncio.run(write())
    transport = Mock(asyncio.WriteTransport, get_write_buffer_size=lambda: slow_reader.NEVER_WAITS - 1)
    assert slow_reader.never_waits(transport, 0) and not slow_reader.never_waits(transport, 1)


def test_a_client_that_left_is_answered_on(guard: Guard, upstream: Upstream) -> None:
    upstream.endless = True
    with socket.create_connection(("127.0.0.1", guard.ports["http"])) as leaves:
        leaves.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        leaves.recv(1)
    until(lambda: upstream.num_left)


def test_a_finished_connection_is_kept(guard: Guard) -> None:
    for body in [b"", b"{}", b"[" * 2000] * 20:
        answer = said(guard, POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert answer == ANSWER or (len(body) > 2 and answer.startswith(b"HTTP/1.1 400 "))
    until(lambda: not (guard._answering or guard._reading))
    assert guard._num_bytes == 0


def test_without_tritonserver_a_client_waits(guard: Guard) -> None:
    assert said(guard, b"GET /x HTTP/1.1\r\n\r\n", "metrics").startswith(b"HTTP/1.1 503 ")


def test_a_tritonserver_whose_queue_is_full_answers_nothing(upstream: Upstream) -> None:
    """asyncio takes such a socket for a connection, and what comes of it is no ConnectionError."""
    guard = Guard("127.0.0.1", ANY_PORTS)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind("full")
        full.listen(0)
        first.connect("full")
        guard.start({"http": Path("full"), "metrics": Path("nowhere")})
        with contextlib.closing(guard):
            answer = said(guard, GET + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 50") and b"try again in a moment" in answer


def test_a_door_that_drains_takes_new_connections_or_cuts_answers(guard: Guard, upstream: Upstream) -> None:
    upstream.endless = True
    with socket.create_connection(("127.0.0.1", guard.ports["http"])) as held:
        held.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        assert held.recv(1)
        guard.refuse()

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", guard.ports["http"])).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refused)
        for _ in range(100):
            assert held.recv(2**16)


def test_a_body_that_is_being_read_when_the_door_closes_gets_no_answer(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a second signal; nor does one that is on its way. Who has asked for nothing gets none."""
    gate, reading = threading.Event(), threading.Event()
    monkeypatch.setattr(guards, "check_content", lambda *_: reading.set() or gate.wait(60))
    large = request(b" " * (guards.SMALL_BODY + 1))
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60))
            for _ in range(3)
        ]
        for caller, sent in zip(callers, (large, large[:100], b"POST /x"), strict=True):
            caller.sendall(sent)
        num_bytes = sum(len(sent.partition(b"\r\n\r\n")[2]) for sent in (large, large[:100]))
        until(lambda: reading.is_set() and guard._num_bytes == num_bytes and len(guard._reading) == 3)
        guard.close("the server burns")
        gate.set()
        answers = [caller.recv(2**16) for caller in callers]
    assert all(
        answer.startswith(b"HTTP/1.1 503 ") and b"the server burns" in answer for answer in answers[:2]
    )
    assert not answers[2]


def test_a_refused_client_that_stays_is_a_traceback_when_the_door_closes(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as stays:
        stays.sendall(b"POST /x HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        assert stays.recv(2**16).startswith(b"HTTP/1.1 413 ")
        guard.close()
    assert not caplog.records


@pytest.mark.parametrize("reason", ["", "tritonserver burns"])
def test_a_probe_behind_the_word_to_refuse_is_answered_by_tritonserver(
    guard: Guard, upstream: Upstream, reason: str
) -> None:
    """The loop comes to know of it later, and so may have taken the connection already."""
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as probe:
        until(lambda: guard._reading)
        held, gate = threading.Event(), threading.Event()
        guard._loop.call_soon_threadsafe(lambda: held.set() or gate.wait(60))
        held.wait(60)
        probe.sendall(b"GET /v2/health/ready HTTP/1.1\r\n\r\n")
        guard.reason = reason
        guard.refuse()
        gate.set()
        answer = probe.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 503 ") and (reason or ending.REASON).encode() in answer
    assert not upstream.asked
    guard.close()
    assert guard.reason == reason, "or streams that are cut say another"


class Held(bytes):
    """Says when nobody has it any more."""

    num_left = 0

    def __del__(self) -> None:
        Held.num_left += 1


def test_a_request_is_held_until_its_answer_has_ended(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some hundred answers at once, with 16 MB each, took all memory."""
    plain = guard._read

    async def read(*given: Any) -> bytes:
        return Held(await plain(*given))

    monkeypatch.setattr(guard, "_read", read)
    monkeypatch.setattr(Held, "num_left", 0)
    upstream.gate.clear()
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), timeout=60) as connection:
        connection.sendall(POST + b"Content-Length: 1000000\r\n\r\n{}" + b" " * 999998)
        until(lambda: upstream.asked)
        until(lambda: Held.num_left)
        assert not upstream.num_left
        upstream.gate.set()
        assert b"".join(iter(lambda: connection.recv(2**16), b"")) == ANSWER
