"""The port of a Peer, without NIXL."""

import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
from kit.descriptors import high
from kit.served import until

from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.serving import peer as peers
from hemiola.runtime.serving.peer import Peer

ASKED = b'{"prompt": [1], "cache_salt": ""}\n'


class Listener:
    """Has no descriptor left at first; then one who asks comes."""

    def __init__(self, asks: socket.socket) -> None:
        self._turns: list[OSError | socket.socket] = [OSError(errno.EMFILE, "Too many open files"), asks]
        self._closed = threading.Event()

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def accept(self) -> tuple[socket.socket, str]:
        if not self._turns:
            self._closed.wait(60)
            raise OSError(errno.EBADF, "closed")
        turn = self._turns.pop(0)
        if isinstance(turn, OSError):
            raise turn
        return turn, ""

    def shutdown(self, how: int) -> None:
        self._closed.set()

    def close(self) -> None: ...


def test_a_peer_that_ran_out_of_descriptors_once_serves_nobody_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, asks = socket.socketpair()
    monkeypatch.setattr(peers, "_agent", object)
    monkeypatch.setattr(peers, "_listen", lambda host, port: Listener(asks))
    ours.settimeout(60)
    ours.sendall(b"no request\n")
    with Peer(lambda prompt, *, cache_salt: bytearray()):
        answer = json.loads(ours.makefile().readline())
    assert answer["code"] == "malformed" and "Too many open files" in caplog.text
    ours.close()


def asked(peer: Peer, line: bytes) -> dict:
    host, _, port = peer.address.partition(":")
    with socket.create_connection((host, int(port)), 60) as asks:
        asks.sendall(line)
        return json.loads(asks.makefile().readline())


def test_a_forked_child_closes_the_door_of_its_parents_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_agent", object)
    with Peer(lambda prompt, *, cache_salt: bytearray()) as peer:
        monkeypatch.setattr(peer, "_pid", 1)  # as a fork finds it
        peer.close()
        monkeypatch.undo()
        assert asked(peer, b"no request\n")["code"] == "malformed"


def test_four_idle_connections_hold_the_port_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 30 s each, since a place was taken before anything was asked."""
    monkeypatch.setattr(peers, "_agent", object)
    monkeypatch.setattr(peers, "PATIENCE", 600.0)
    with Peer(lambda prompt, *, cache_salt: bytearray()) as peer, ExitStack() as stack:
        host, _, port = peer.address.partition(":")

        def idle() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(port)), 60))

        silent = [idle() for _ in range(peers.MOST_AT_ONCE)]
        assert asked(peer, b"no request\n")["code"] == "malformed"
        until(lambda: len(peer._silent) == len(silent))
        monkeypatch.setattr(peers, "MOST_SILENT", len(silent))
        idle()
        assert silent[0].recv(1) == b"", "the oldest is closed"
        assert asked(peer, b"no request\n")["code"] == "malformed"
        until(lambda: len(peer._silent) == len(silent) - 1)  # the one that asked came last
        peer.close()
        assert silent[-1].recv(1) == b"", "a peer that is closed keeps connections"


def test_those_who_wait_for_a_place_are_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_agent", object)
    monkeypatch.setattr(peers, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(peers, "MOST_ASKED", 1)
    begun, gate = threading.Event(), threading.Event()

    def export(prompt: list[int], *, cache_salt: str) -> bytearray:
        begun.set()
        gate.wait(60)
        raise Failed("no engine")

    with Peer(export) as peer, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(asked, peer, ASKED) for _ in range(2)]
        assert begun.wait(60)
        until(lambda: peer._asked._value == 0)
        assert "1 others wait" in asked(peer, ASKED)["refused"]
        gate.set()
        assert [one.result()["refused"] for one in waiting] == ["no engine"] * 2


def test_who_asks_while_a_peer_closes_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` took all places, for those that it waited for, and kept them."""
    monkeypatch.setattr(peers, "_agent", object)
    ours, theirs = socket.socketpair()
    peer, exported = Peer(), []
    with ours, theirs:
        peer.close()
        serving = threading.Thread(
            target=peer._answer_in_turn,
            args=(theirs, ASKED, lambda *_, **__: exported.append(1)),
            daemon=True,
        )
        serving.start()
        serving.join(30)
        assert not serving.is_alive() and not exported


def test_a_peer_with_a_thousand_connections_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited with select(), which takes no descriptor from 1024 on; the fetch was told of a lost peer."""
    released = []
    agent = SimpleNamespace(
        get_partial_agent_metadata=lambda *_: b"agent", get_new_notifs=lambda: released.append(False)
    )
    monkeypatch.setattr(peers, "_agent", lambda: agent)
    monkeypatch.setattr(Peer, "_registered", lambda *_: nullcontext())
    ours, theirs = socket.socketpair()
    with theirs, ours, socket.socket(fileno=high(theirs.fileno())) as asks, Peer() as peer:
        ours.settimeout(60)
        serving = threading.Thread(
            target=peer._answer_one, args=(asks, ASKED, lambda prompt, *, cache_salt: bytearray(b"packed"))
        )
        serving.start()
        assert json.loads(ours.makefile().readline())["size"] == 6
        until(lambda: bool(released))
        ours.sendall(b"done\n")
        serving.join(60)
        assert not serving.is_alive()


def test_a_line_that_has_no_end_fills_the_memory_or_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_LINE", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 1000)
        with pytest.raises(TimeoutError):  # it may yet end
            peers._line(ours, time.monotonic())
        theirs.sendall(b"x" * 1001)
        with pytest.raises(ConnectionError, match="no end"):
            peers._line(ours, time.monotonic() + 60)
        theirs.sendall(b"x" * 999 + b"\n")
        assert peers._line(ours, time.monotonic() + 60) == b"x" * 999 + b"\n"


GOOD = {"agent": "YQ==", "place": 4096, "size": 8}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"size": size} for size in (0, -1, peers.MOST_BYTES + 1, True, 1.5, "8", None)),
        *({"place": place} for place in (0, -1, 2**64, True, 1.5, "8", None)),
        *({"agent": agent} for agent in ("?", 5, None)),
    ],
)
def test_an_answer_that_no_peer_would_give_takes_memory(wrong: dict) -> None:
    assert peers._answer("h:1", json.dumps(GOOD).encode()) == GOOD | {"agent": b"a"}
    assert peers._answer("h:1", json.dumps(GOOD | {"size": peers.MOST_BYTES, "place": 2**64 - 1}).encode())
    with pytest.raises(Refused, match=r"^the peer h:1 answers ") as caught:
        peers._answer("h:1", json.dumps(GOOD | wrong).encode())
    assert caught.value.code == "malformed"
