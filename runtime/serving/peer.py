"""Prefixes from one process to another: a peer exports what its engine has stored, another fetches it.

    with LLM(engine, host_cache_bytes=2**30) as llm, Peer(llm.export_prefix, port=9300) as peer: ...
    with LLM(engine, host_cache_bytes=2**30) as llm, Peer() as peer:
        llm.import_prefix(peer.fetch("10.0.0.1:9300", llm.encode(prompt)))

A TCP connection carries a line of JSON each way: which prompt, and where its prefix lies. Its bytes go
through NIXL, by what the two hosts have in common (UCX: RDMA, shared memory, TCP). Nothing here is encrypted.
Who reaches the port gets what is stored of a prompt that it knows, and NIXL trusts its peers: this is for
replicas in a network of their own.
"""

import base64
import itertools
import json
import logging
import os
import select
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import numpy as np

from hemiola.runtime.errors import CODES, Code, Failed, Lost, Refused, one_line, shown
from hemiola.runtime.extra import lacking

log = logging.getLogger("hemiola")
PATIENCE = 30.0  # seconds that a peer has for its part
MOST_LINE = 2**23  # bytes: of 800,000 ids
MOST_BYTES = 2**36  # of a prefix
MOST_AT_ONCE = 4  # exports
MOST_ASKED = 64  # that wait for one of these places; others are refused
MOST_FETCHES = 64  # by one agent: of each, both ends keep a connection open until the agent goes
MOST_SILENT = 128  # connections that have not asked yet; of more the oldest is closed
PIECE = 2**24  # bytes of one transfer: a copy that a transport makes at once holds Python's lock
POLL = 0.0005  # seconds
PAUSE = 0.1  # after a peer that could not be let in
UNREADABLE = {"nixlMismatchError", "nixlInvalidParamError"}  # what NIXL says to bytes that are no agent


class Export(Protocol):
    """LLM.export_prefix."""

    def __call__(self, prompt: Sequence[int], *, cache_salt: str) -> bytearray: ...


class Peer:
    """Fetches prefixes; with `export` it also serves them, at `address`. Port 0: any that is free.

    Raises Refused where it cannot listen, ImportError without nixl.
    """

    def __init__(self, export: Export | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self._agent = _agent()
        self._num_fetches = 0
        self._lock = threading.Lock()  # around all agents
        self._reading: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by address
        self._closing = False
        self._pid = os.getpid()
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._asked = threading.BoundedSemaphore(MOST_AT_ONCE + MOST_ASKED)
        self._silent: dict[int, socket.socket] = {}  # by number, the oldest first
        self._listener: socket.socket | None = None
        self.address = ""
        if export is not None:
            self._listener = _listen(host, port)
            self.address = "{}:{}".format(*self._listener.getsockname()[:2])
            serve = threading.Thread(
                target=self._accept, args=(self._listener, export), name="hemiola-peer", daemon=True
            )
            serve.start()

    def fetch(
        self, address: str, prompt: Sequence[int], cache_salt: str = "", timeout_s: float = PATIENCE
    ) -> memoryview:
        """The packed prefix that the peer at `HOST:PORT` has of these ids, for LLM.import_prefix.

        Raises Refused for what the peer refuses or what no peer would answer, Lost when it is gone or does
        not answer in time."""
        end = time.monotonic() + timeout_s
        asked = {"prompt": [int(token_id) for token_id in prompt], "cache_salt": cache_salt}
        with _connected(address, timeout_s) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            answer = _answer(address, _line(connection, end))
            if "refused" in answer:
                raise _refused(address, answer)
            packed, agent = np.zeros(answer["size"], np.uint8), self._agent_of_a_fetch()
            with (
                self._alone(address, end),
                self._remote(agent, address, answer["agent"]) as name,
                self._registered(agent, packed),
            ):
                for first in range(0, len(packed), PIECE):
                    into, place = packed[first : first + PIECE], answer["place"] + first
                    self._read(agent, address, name, into, place, end)
            with suppress(OSError):
                connection.sendall(b"done\n")
        return packed.data

    def close(self) -> None:
        """Serve no more; exports under way end."""
        if os.getpid() != self._pid:  # a fork, whose sockets are also its parent's
            return
        self._closing = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for number in list(self._silent):
            _hang_up(self._silent.pop(number, None))
        for _ in [place for place in range(MOST_AT_ONCE) if self._places.acquire(timeout=PATIENCE)]:
            self._places.release()  # who still waits for one sees that this peer closes

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Who fetches.

    def _agent_of_a_fetch(self) -> Any:
        """Another from time to time; whoever uses the one before still has it."""
        with self._lock:
            self._num_fetches += 1
            if self._num_fetches % MOST_FETCHES:
                return self._agent
        made = _agent()
        with self._lock:
            self._agent = made
        return made

    def _read(self, agent: Any, address: str, name: str, into: np.ndarray, place: int, end: float) -> None:
        with self._lock:
            destination = agent.get_xfer_descs([(into.ctypes.data, len(into), 0)], "DRAM")
            there = agent.get_xfer_descs([(place, len(into), 0)], "DRAM")
            with _as_lost(address):
                transfer = agent.initialize_xfer("READ", destination, there, name)
                state = agent.transfer(transfer)
        try:
            while state == "PROC":
                if time.monotonic() > end:
                    raise Lost(f"the peer {address} has not sent a prefix in time")
                time.sleep(POLL)
                with self._lock, _as_lost(address):
                    state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise Lost(f"the peer {address} is gone: its prefix could not be read")
        finally:
            with self._lock, suppress(Exception):
                transfer.release()

    @contextmanager
    def _alone(self, address: str, end: float) -> Iterator[None]:
        """One read at a time from a peer: when it ends, NIXL forgets all that it knows of that agent."""
        with self._lock:
            reading = self._reading[address]
        if not reading.acquire(timeout=max(0.0, end - time.monotonic())):
            raise Lost(f"the peer {address} has not sent a prefix in time")
        try:
            yield
        finally:
            reading.release()

    @contextmanager
    def _remote(self, agent: Any, address: str, metadata: bytes) -> Iterator[str]:
        """The name of the peer's agent."""
        try:
            with self._lock:
                name = agent.add_remote_agent(metadata)
        except Exception as error:
            if type(error).__name__ in UNREADABLE:
                raise _garbage(address, f"NIXL cannot read its agent ({one_line(error)})") from None
            raise _gone(address, error) from None
        try:
            yield name
        finally:
            with self._lock, suppress(Exception):
                agent.remove_remote_agent(name)

    @contextmanager
    def _registered(self, agent: Any, content: np.ndarray) -> Iterator[Any]:
        """The agents of others may read it, or this one may write it."""
        with self._lock:
            memory = agent.register_memory([(content.ctypes.data, len(content), 0, "")], "DRAM")
        try:
            yield memory
        finally:
            with self._lock:
                agent.deregister_memory(memory)

    # Who serves.

    def _accept(self, listener: socket.socket, export: Export) -> None:
        warned = False  # since the last one that was let in
        for number in itertools.count():
            try:
                connection, _ = listener.accept()
            except OSError as error:  # it is closed, or this process has no descriptor left for now
                if self._closing:
                    return
                if not warned:
                    log.warning("peers cannot be let in: %s", one_line(error))
                warned = True
                time.sleep(PAUSE)
                continue
            warned = False
            self._silent[number] = connection
            if len(silent := list(self._silent)) > MOST_SILENT:  # who asks does so at once
                _hang_up(self._silent.pop(silent[0], None))
            threading.Thread(target=self._serve, args=(number, connection, export), daemon=True).start()

    def _serve(self, number: int, connection: socket.socket, export: Export) -> None:
        try:
            with connection:
                try:
                    line = _line(connection, time.monotonic() + PATIENCE)
                finally:
                    self._silent.pop(number, None)
                self._answer_in_turn(connection, line, export)
        except OSError as error:
            log.warning("a peer that asked for a prefix is gone: %s", one_line(error))
        except Exception:
            log.exception("a prefix could not be sent to a peer")

    def _answer_in_turn(self, connection: socket.socket, line: bytes, export: Export) -> None:
        if not self._asked.acquire(blocking=False):
            _refuse(connection, Failed(f"{MOST_ASKED} others wait for a prefix; ask again in a moment"))
            return
        try:
            with self._places:
                if not self._closing:
                    self._answer_one(connection, line, export)
        finally:
            self._asked.release()

    def _answer_one(self, connection: socket.socket, line: bytes, export: Export) -> None:
        try:
            packed = np.frombuffer(_exported(line, export), np.uint8)
        except (Refused, Failed) as error:
            _refuse(connection, error)
            return
        agent = self._agent
        with self._registered(agent, packed) as memory:
            with self._lock:
                described = agent.get_partial_agent_metadata(memory, True, ["UCX"])
            place = {"agent": base64.b64encode(described).decode(), "place": packed.ctypes.data}
            connection.sendall(json.dumps(place | {"size": len(packed)}).encode() + b"\n")
            end = time.monotonic() + PATIENCE
            ended = select.poll()  # it is done, or gone
            ended.register(connection, select.POLLIN)
            while not ended.poll(0):
                time.sleep(POLL)
                if time.monotonic() > end or self._closing:
                    return
                with self._lock:
                    agent.get_new_notifs()  # moves what is under way


def _hang_up(connection: socket.socket | None) -> None:
    """The thread that reads it ends. None: it has asked just now."""
    with suppress(OSError):  # it has ended by itself
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)


def _refuse(connection: socket.socket, error: Refused | Failed) -> None:
    code = error.code if isinstance(error, Refused) else "failed"
    connection.sendall(json.dumps({"refused": str(error), "code": code}).encode() + b"\n")


def _agent() -> Any:
    try:
        import nixl  # pyright: ignore[reportMissingImports]  # an extra of its own
    except ModuleNotFoundError as error:
        raise ImportError(lacking("hemiola's Peer", error), name=error.name) from None
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
    config = nixl.nixl_agent_config(
        enable_prog_thread=False,  # it takes a quarter of a core, also while nobody asks
        backends=["UCX"],
    )
    return nixl.nixl_agent(f"hemiola-{uuid.uuid4().hex}", config)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        message = f"cannot listen on {host}:{port} ({one_line(error)})"
        raise Refused("in_use", "port", message=message, way_out="choose another port") from None


def _exported(line: bytes, export: Export) -> bytearray:
    """Of a request that anybody may have sent."""
    prompt: Any = None
    cache_salt: Any = None
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        asked = json.loads(line)
        prompt, cache_salt = asked["prompt"], asked["cache_salt"]
    is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    if not is_ids or not isinstance(cache_salt, str):
        way_out = "send prompt, a list of ids, and cache_salt"
        raise Refused("malformed", message="the request for a prefix cannot be read", way_out=way_out)
    return export(prompt, cache_salt=cache_salt)


@contextmanager
def _connected(address: str, timeout_s: float) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise Refused("malformed", "address", address, way_out="give HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            yield connection
    except TimeoutError:
        raise Lost(f"the peer {address} does not answer") from None
    except OSError as error:
        raise _gone(address, error) from None


def _line(connection: socket.socket, end: float) -> bytes:
    """Raises OSError where it has no end in time."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(end - time.monotonic(), POLL))
        part = connection.recv(2**16)
        line += part
        if not part or len(line) > MOST_LINE:
            raise ConnectionError("what it says has no end")
    connection.settimeout(PATIENCE)
    return bytes(line)


def _answer(address: str, line: bytes) -> dict[str, Any]:
    """Raises Refused where no peer would say this."""
    try:
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("refused"), str):
            return message
        message["agent"] = base64.b64decode(message["agent"], validate=True)
        place, size = message["place"], message["size"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise _garbage(address, shown(line)) from None
    if type(size) is not int or not 0 < size <= MOST_BYTES or type(place) is not int or not 0 < place < 2**64:
        raise _garbage(address, f"{shown(size)} bytes at {shown(place)}")
    return message


def _refused(address: str, answer: dict[str, Any]) -> Refused:
    code = cast(Code, answer.get("code")) if answer.get("code") in CODES else "other"
    return Refused(code, message=f"the peer {address}: {one_line(answer['refused'])}")


def _garbage(address: str, said: str) -> Refused:
    way_out = "is another program listening there?"
    return Refused("malformed", "address", message=f"the peer {address} answers {said}", way_out=way_out)


@contextmanager
def _as_lost(address: str) -> Iterator[None]:
    """NIXL has an error of its own for each of a dozen causes."""
    try:
        yield
    except Exception as error:
        raise _gone(address, error) from None


def _gone(address: str, error: Exception) -> Lost:
    return Lost(f"the peer {address} is gone ({one_line(error)})")
