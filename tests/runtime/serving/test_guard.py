"""The HTTP doors before a server that a test has written."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.served import until

from hemiola.runtime.serving import guard as guards
from hemiola.runtime.serving.guard import Guard
from hemiola.runtime.serving.tritonserver import ANY_PORTS

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


POST = b"POST /x HTTP/1.1\r\n"


class Upstream:
    """Remembers what it was asked, and answers `answer`; with `endless`, again and again."""

    def __init__(self, path: Path) -> None:
        self.asked: list[bytes] = []
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
            connection.sendall(ANSWER)
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
        (415, b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
        (431, b"X-A: %s\r\n\r\n" % (b"a" * 2**17)),
    ],
)
def test_what_is_no_plain_request_goes_on(
    guard: Guard, upstream: Upstream, status: int, request_: bytes
) -> None:
    found = said(guard, b"POST /x HTTP/1.1\r\nHost: a\r\n" + request_)
    assert found.startswith(b"HTTP/1.1 %d " % status), found
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]
    assert not upstream.asked


@pytest.mark.parametrize(
    "begun", [b"", b"POST /x HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_client_that_trickles_stays_for_ever(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(guards, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(guards, "BODY_TIMEOUT_S", 0.1)
    assert said(guard, begun).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_is_dead_holds_a_growing_buffer(
    guard: Guard, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "WRITE_TIMEOUT_S", 1.0)
    upstream.endless = True
    with socket.create_connection(("127.0.0.1", guard.ports["http"])) as dead:
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        dead.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        until(lambda: upstream.num_left)
    assert upstream.num_sent < 64 * 2**20
    assert not guard._answering


def test_a_client_that_left_is_answered_on(guard: Guard, upstream: Upstream) -> None:
    upstream.endless = True
    with socket.create_connection(("127.0.0.1", guard.ports["http"])) as leaves:
        leaves.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        leaves.recv(1)
    until(lambda: upstream.num_left)


def test_a_finished_connection_is_kept(guard: Guard) -> None:
    for _ in range(64):
        assert said(guard, b"GET /x HTTP/1.1\r\n\r\n") == ANSWER
    until(lambda: not (guard._answering or guard._reading))
    assert guard._num_bytes == 0


def test_without_tritonserver_a_client_waits(guard: Guard) -> None:
    assert said(guard, b"GET /x HTTP/1.1\r\n\r\n", "metrics").startswith(b"HTTP/1.1 503 ")


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
