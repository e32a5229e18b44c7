"""What a server decides before and after tritonserver; tests/model_repo has the real one."""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.refused import code_and_field
from kit.served import until

from hemiola.runtime.errors import Refused
from hemiola.runtime.progress import Display
from hemiola.runtime.serving import ending, heartbeat, launcher
from hemiola.runtime.serving.engines import name_engines, read_models
from hemiola.runtime.serving.heartbeat import Beat
from hemiola.runtime.serving.home import Home
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.listener import refuse_connections
from hemiola.runtime.serving.ports import ANY_PORTS, Ports, are_free, bind, choose_ports
from hemiola.runtime.serving.tritonserver import Triton, command_line

A, B = Path("a"), Path("b")


def test_engines_are_named_in_order() -> None:
    assert name_engines([A], []) == {"hemiola": A}
    assert name_engines([A, B], ["x", "y-1.0"]) == {"x": A, "y-1.0": B}


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        (lambda: name_engines([A, B], []), "conflict", "model_name"),
        (lambda: name_engines([A], ["x", "y"]), "conflict", "model_name"),
        (lambda: name_engines([A, B], ["x", "x"]), "conflict", "model_name"),
        (lambda: name_engines([A], ["../x"]), "malformed", "model_name"),
        (lambda: name_engines([A], [""]), "malformed", "model_name"),
        (lambda: name_engines([A], ["x" * 201]), "malformed", "model_name"),  # no name of a folder, too
        (lambda: Server({"hemiola": Path("a\0b")}).check(), "not_found", "engine_dir"),
        (lambda: Server({"hemiola": A}, options={"max_row": 4}), "unknown", "max_row"),
        (lambda: Server({"hemiola": Path("é")}), "unsupported", "engine_dir"),
        (lambda: Server({"hemiola": A}, options={"disk_cache_dir": "é"}), "unsupported", "disk_cache_dir"),
        (lambda: Server({"hemiola": A}, options={"disk_cache_dir": ""}), "wrong_type", "disk_cache_dir"),
    ],
)
def test_names_and_options_that_cannot_be_are_refused_at_once(
    call: Callable[[], object], code: str, field: str
) -> None:
    assert code_and_field(call) == (code, field)


def test_a_relative_disk_cache_dir_goes_with_the_servers_own_folder(tmp_path: Path) -> None:
    """In which tritonserver runs: the prefixes were removed when the server ended."""
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"x": {"engine_dir": "a", "disk_cache_dir": "own"}, "y": {"engine_dir": "b"}}))
    engines, settings_of = read_models(file, [], [])
    server = Server(engines, options={"disk_cache_dir": "all"}, settings_of=settings_of)
    folders = [settings["disk_cache_dir"] for settings in server._settings.values()]
    assert folders == [str(tmp_path / "own"), str(Path.cwd() / "all")]


def test_every_interface_is_reached_by_loopback() -> None:
    server = Server({}, host="0.0.0.0")
    server.ports = SimpleNamespace(http=1, grpc=2, metrics=3)
    assert (server.http_url, server.grpc_url) == ("http://127.0.0.1:1", "127.0.0.1:2")
    assert server.metrics_url == "http://127.0.0.1:3/metrics"


def test_the_door_whose_callers_can_end_the_server_is_where_the_others_are() -> None:
    server = Server({}, host="0.0.0.0", grpc_host="127.0.0.2", ports=Ports(0, 0, 0))
    with bind("127.0.0.2", 0, "grpc", listens=True) as taken:
        port = taken.getsockname()[1]
        assert not are_free(server.host, Ports(0, port, 0), server.grpc_host)
    server.ports = choose_ports(server.host, Ports(0, port, 0), server.grpc_host)
    assert (server.grpc_url, server.ports.grpc) == (f"127.0.0.2:{port}", port)
    home: Any = SimpleNamespace(path=A, doors=B, shm_prefix="x")
    told = command_line(Triton(A, A, A), home, server.ports, server._switches)
    assert "--grpc-address=127.0.0.2" in told


def test_tritonserver_is_told_no_name_which_it_takes_for_255_255_255_255() -> None:
    """And its HTTP servers listen where only our own doors reach them."""
    server = Server({}, host="localhost")
    server.ports = Ports(1, 2, 3)
    home: Any = SimpleNamespace(path=A, doors=B, shm_prefix="x")
    told = command_line(Triton(A, A, A), home, server.ports, server._switches)
    assert {word for word in told if "-address=" in word} == {
        "--http-address=unix:b/http",
        "--grpc-address=127.0.0.1",
        "--metrics-address=unix:b/metrics",
    }
    assert server.http_url == "http://127.0.0.1:1"


@pytest.mark.parametrize("seconds", [0, 3, 2**31 - 1])
def test_tritonserver_ends_itself_before_we_can_say_what_is_lost(seconds: int) -> None:
    """Its limit was ours: callers read "tritonserver ended with -11" for a reason, or 1."""
    server = Server({}, exit_timeout_s=seconds)
    home: Any = SimpleNamespace(path=A, doors=B, shm_prefix="x")
    told = command_line(Triton(A, A, A), home, Ports(1, 2, 3), server._switches)
    (limit,) = [int(word.partition("=")[2]) for word in told if word.startswith("--exit-timeout-secs=")]
    assert min(seconds + 10, 2**31 - 1) <= limit < 2**31


def test_a_broken_engine_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    server = Server({"hemiola": tmp_path})
    with pytest.raises(Refused, match=rf"^{tmp_path} has no manifest\.json"), server:
        pass
    assert server._home is None and server._process is None


@pytest.mark.parametrize("wanted", [ANY_PORTS, Ports(40_123, 40_124, 40_125)])
def test_a_free_port_that_somebody_else_takes_first_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, wanted: Ports
) -> None:
    """Tritonserver takes its ports when its engines are loaded; one that was asked for is no other."""
    tried: list[Ports] = []
    others = ExitStack()

    def start(server: Server, display: Display) -> None:
        tried.append(server.ports)
        if len(tried) < 3:
            others.enter_context(bind(server.host, server.ports.grpc, "grpc", listens=True))
            raise Refused("failed", message="tritonserver did not start: Socket '127.0.0.1:1'")

    monkeypatch.setattr(Server, "start", start)
    server = Server({}, ports=wanted)
    server.ports = choose_ports(server.host, ANY_PORTS)
    with others, pytest.raises(Refused, match="did not start") if all(wanted) else nullcontext(), server:
        pass
    assert len(set(tried)) == (1 if all(wanted) else 3)


def test_a_server_that_cannot_start_on_free_ports_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Ports] = []

    def start(server: Server, display: Display) -> None:
        tried.append(server.ports)
        raise Refused("failed", message="the port of another program is already in use")

    monkeypatch.setattr(Server, "start", start)
    server = Server({})
    server.ports = choose_ports(server.host, ANY_PORTS)
    with pytest.raises(Refused, match="of another program"), server:
        pass
    assert len(tried) == 1


@pytest.fixture
def family(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that ignores SIGTERM, and its child, as a tritonserver that hangs and its engine."""
    child = "echo $$ > pid; while true; do sleep 0.1; done"
    command = ["sh", "-c", f"trap '' TERM; (exec sh -c '{child}') & wait"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    yield process
    with suppress(ProcessLookupError):  # or the child would live on
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serving(family: subprocess.Popen[str], *names: str, exit_timeout_s: float = 60) -> Server:
    """A server that has started this family, and whose engines have three requests each."""
    server = Server(dict.fromkeys(names, A), exit_timeout_s=exit_timeout_s)
    server._process, server._home = family, Home()
    for name in names:
        heartbeat.write(server._home.beats / name, heartbeat.now(0, 0, 3, ""))
    return server


def test_a_server_that_hangs_is_killed_with_its_engine(family: subprocess.Popen[str], tmp_path: Path) -> None:
    server = serving(family, "m", exit_timeout_s=1)
    with pytest.raises(
        RuntimeError, match=r"^3 requests in flight are lost: not ended within 1 s \(--exit-t"
    ):
        server.stop()
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until(lambda: not child.exists() or " Z " in child.read_text())  # a busy machine takes its time
    server.stop()  # nothing is left to stop


@pytest.mark.parametrize(
    ("num_open", "said"),
    [(0, ""), (1, "1 request in flight is lost: not ended within 0 s (--exit-timeout)")],
)
def test_nothing_in_flight_is_no_loss_and_one_request_is_no_requests(
    family: subprocess.Popen[str], num_open: int, said: str
) -> None:
    server = serving(family, "m", exit_timeout_s=0)
    heartbeat.write(server._home.beats / "m", heartbeat.now(0, 0, num_open, ""))
    assert server._drain() == said
    server.kill()


def test_one_restart_is_no_restarts(family: subprocess.Popen[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^it burns; 1 restart \(--restart\) did not help$"):
        serving(family)._started_again("it burns", left=0, restarts=1)


def test_a_container_that_was_paused_loses_its_server(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its processes were stopped: nobody has moved, and nobody has hung."""
    server = serving(family, "m")
    old = heartbeat.now(0, 0, 0, "")._replace(time=time.monotonic() - 100)
    heartbeat.write(server._home.beats / "m", old)
    looks = iter([3.0, 3.0, 40.0])
    monkeypatch.setattr(heartbeat.Awake, "look", lambda self: next(looks))
    monkeypatch.setattr(launcher, "WATCH_S", 0.01)
    monkeypatch.setattr(launcher, "FAREWELL_S", 0.0)
    assert "has not moved for 100 s" in server.wait()
    assert not list(looks), "it judged before it had looked for as long itself"


def test_a_container_that_was_paused_while_it_drains_loses_its_requests(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, looks = serving(family, "m"), []
    old = heartbeat.now(0, 0, 3, "")._replace(time=time.monotonic() - 100)
    heartbeat.write(server._home.beats / "m", old)
    monkeypatch.setattr(heartbeat.Awake, "look", lambda self: looks.append(1) or 3.0)
    monkeypatch.setattr(launcher, "DRAINED_S", 0.0)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(server._drain)
        until(lambda: len(looks) > 2 or lost.done())
        heartbeat.write(server._home.beats / "m", heartbeat.now(0, 0, 0, ""))
        assert lost.result(60) == ""
    server.kill()


def test_a_gap_between_two_looks_is_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    awake, found = heartbeat.Awake(), []
    for passed in (1.0, heartbeat.PAUSE_S, heartbeat.PAUSE_S + 1, 1.0, 2.0, 60.0, 4.0):
        clock[0] += passed
        found.append(awake.look())
    assert found == [math.inf, math.inf, 0.0, 1.0, 3.0, 0.0, 4.0]


def test_a_disk_that_is_full_ends_a_server_with_restarts_left(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    server, said = serving(family), list[str]()
    monkeypatch.setattr(launcher, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(server, "start", start)
    monkeypatch.setattr(server.printer, "say", said.append)
    assert not server._started_again("it burns", left=1, restarts=2)
    assert said[-1] == "lost again: [Errno 28] No space left on device\n"


def test_a_server_that_was_well_for_long_has_no_restart_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two restarts in a row are allowed: after ten minutes of service both are there again."""
    clock, tries = [0.0], []
    served = iter([1.0, 1.0, launcher.RECOVERED_S + 1, 1.0, 1.0, 1.0])

    class Failing(Server):
        def __init__(self) -> None: ...

        def wait(self) -> str:
            clock[0] += next(served)
            return "it burns"

        def _started_again(self, reason: str, left: int, restarts: int) -> bool:
            tries.append(left)
            if not left:
                raise RuntimeError(reason)
            return True

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(RuntimeError, match="it burns"):
        Failing().serve(restarts=2)
    assert tries == [2, 1, 2, 1, 0]


def test_who_interrupts_a_server_that_drains_does_not_wait_for_it(family: subprocess.Popen[str]) -> None:
    server = serving(family, "m", exit_timeout_s=10**9)
    server.__exit__(KeyboardInterrupt)
    assert server._process is None and server._home is None


def test_requests_of_an_engine_that_died_are_not_waited_for(family: subprocess.Popen[str]) -> None:
    server = serving(family, "m", "other")
    gone = subprocess.Popen(["true"])
    gone.wait()
    heartbeat.write(server._home.beats / "m", Beat(gone.pid, time.monotonic(), 0, 0, 2))
    heartbeat.write(server._home.beats / "other", heartbeat.now(0, 0, 0, ""))
    with pytest.raises(
        RuntimeError, match=rf"^2 requests in flight are lost: m: its process {gone.pid} has e"
    ):
        server.stop()


def test_a_dead_engine_cuts_off_the_streams_of_another_that_drains(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "DRAINED_S", 0.0)
    server = serving(family, "m", "other")
    gone = subprocess.Popen(["true"])
    gone.wait()
    heartbeat.write(server._home.beats / "m", Beat(gone.pid, time.monotonic(), 0, 0, 2))
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(server._drain)
        looks, look = [], server._in_flight
        monkeypatch.setattr(server, "_in_flight", lambda hang_s: looks.append(1) or look(hang_s))
        until(lambda: len(looks) > 5)
        assert not lost.done(), "three requests of the other engine are under way"
        heartbeat.write(server._home.beats / "other", heartbeat.now(0, 0, 0, ""))
        assert lost.result(60) == f"2 requests in flight are lost: m: its process {gone.pid} has ended"
    server.kill()


def test_an_engine_that_raised_is_not_cut_off_while_it_tells_its_callers(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "FAREWELL_S", 0.0)
    monkeypatch.setattr(launcher, "MOST_FAREWELL_S", 1e9)
    server = serving(family, "m")
    server.ports = choose_ports(server.host, ANY_PORTS)
    beat = server._home.beats / "m"
    heartbeat.write(beat, heartbeat.now(0, 0, 2, ""))
    server._hear_out()  # one that is dead or hangs tells them nothing
    heartbeat.write(beat, heartbeat.now(0, 0, 2, "fire"))
    with ThreadPoolExecutor(1) as threads:
        reason = threads.submit(server.wait)
        with pytest.raises(TimeoutError):
            reason.result(3 * launcher.WATCH_S)
        heartbeat.write(beat, heartbeat.now(0, 0, 0, "fire"))
        assert reason.result(60) == "m: fire"


def test_models_whose_names_differ_behind_a_dot_alone_write_each_its_own_heartbeat(tmp_path: Path) -> None:
    """Both wrote qwen3.new, and one engine's beat became the other's; and both were called qwen3."""
    failures = {"qwen3.5": "five", "qwen3.6": "six", "qwen3": "three", "qwen3.new": "new"}

    def write(name: str) -> None:
        for _ in range(300):
            heartbeat.write(tmp_path / name, heartbeat.now(0, 0, 0, failures[name]))
            assert heartbeat.trouble(tmp_path / name, 60) == f"{name}: {failures[name]}"

    with ThreadPoolExecutor(len(failures)) as threads:
        list(threads.map(write, failures))
    for name in failures:
        heartbeat.remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_took_too_long_named_no_way_out(family: subprocess.Popen[str]) -> None:
    server = serving(family, "m")
    server._start_timeout_s, server._guard = 0, SimpleNamespace(reason="", close=lambda: None)
    server._log = SimpleNamespace(reason=lambda: "compiling kernels")
    with pytest.raises(
        Refused, match=r"after 0 s \(--start-timeout\): compiling kernels; raise it, or start again"
    ):
        server._await_ready(lambda *_, **__: None)
    server.kill()


@pytest.mark.parametrize("num_stuck", [1, 2, 3])
def test_a_server_that_loads_and_never_opens_is_waited_for_until_the_start_timeout(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, num_stuck: int
) -> None:
    """Seen once: tritonserver's threads slept behind a loaded engine, and nothing listened."""
    monkeypatch.setattr(launcher, "OPEN_S", 0.0)
    server, starts, said = serving(family, "m"), [], []
    monkeypatch.setattr(server.printer, "say", said.append)

    def start(display: Display) -> None:
        starts.append(server.ports)
        if len(starts) <= num_stuck:
            server._process = server._process or SimpleNamespace(
                poll=lambda: None, pid=0, wait=lambda *_: 0, terminate=lambda: None
            )
            server._guard = SimpleNamespace(reason="", close=lambda: None)
            server._home = server._home or Home()
            heartbeat.write(server._home.beats / "m", heartbeat.now(0, 0, 0, ""))
            server._await_ready(display)

    monkeypatch.setattr(server, "start", start)
    monkeypatch.setattr(launcher.os, "killpg", lambda *_: family.kill())
    words = r"^tritonserver has loaded its engines, but opened no door within 0 s; start it again$"
    with pytest.raises(Refused, match=words) if num_stuck == launcher.TRIES else nullcontext():
        server._start_first()
    assert len(starts) == min(num_stuck + 1, launcher.TRIES)
    assert len(said) == min(num_stuck, launcher.TRIES - 1)
    server.kill()


def test_a_tritonserver_that_aborts_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, family: subprocess.Popen[str]
) -> None:
    """Seen once: boost::interprocess::lock_exception, and the whole server was refused."""
    server, said = serving(family, "m"), []
    statuses = iter([-signal.SIGABRT, 1])
    monkeypatch.setattr(server.printer, "say", said.append)
    monkeypatch.setattr(server, "kill", lambda: None)

    def start(display: Display) -> None:
        status = next(statuses)
        server._process = SimpleNamespace(poll=lambda: status)
        server._home, server._guard = Home(), SimpleNamespace(reason="")
        server._log = SimpleNamespace(reason=lambda *_: "boost::interprocess::lock_exception")
        server._await_ready(display)

    monkeypatch.setattr(server, "start", start)
    with pytest.raises(Refused, match=r"^tritonserver did not start: boost"):
        server._start_first()
    assert len(said) == 1 and "it ended with -6" in said[0], "the first start was said and repeated"


class FakeDoor:
    """Remembers what it was told, and whether the server still ran."""

    def __init__(self, server: Server) -> None:
        self.told: list[tuple[str, bool]] = []
        self.refused = False
        self._server = server

    @property
    def reason(self) -> str:
        return self.told[-1][0] if self.told else ""

    @reason.setter
    def reason(self, text: str) -> None:
        if text != self.reason:
            self.told.append(
                (text, self._server._process is not None and self._server._process.poll() is None)
            )

    def refuse(self) -> None:
        self.refused = True


def test_a_front_is_told_why_its_streams_are_cut_when_they_are_cut_already(
    family: subprocess.Popen[str],
) -> None:
    server = serving(family, "m", exit_timeout_s=0)
    front = FakeDoor(server)
    server.fronts.append(front)
    with pytest.raises(RuntimeError, match="3 requests in flight are lost"):
        server.stop()
    assert front.refused
    assert front.told == [("3 requests in flight are lost: not ended within 0 s (--exit-timeout)", True)]


def test_a_front_names_a_socket_while_its_server_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost it for a reason."""

    def guard(*_: object) -> None:
        raise Refused("in_use", message="the port is taken")

    monkeypatch.setattr(launcher, "Guard", guard)
    server = Server({})
    door, server._triton = FakeDoor(server), SimpleNamespace()
    server.fronts.append(door)
    server._tell("it burns")
    with pytest.raises(Refused, match="the port is taken"):
        server.start()
    assert door.reason == "it burns"


def test_an_engine_takes_new_requests_of_a_server_that_ends(family: subprocess.Popen[str]) -> None:
    """Over gRPC connections that it has: tritonserver serves these until it is gone."""
    server = serving(family, "m")
    beat = server._home.beats / "m"
    assert not ending.begun(beat)
    server.refuse()
    assert ending.begun(beat)
    server.kill()


LISTENS = """
import socket, sys
held = socket.create_server(("127.0.0.1", 0))
print(held.getsockname()[1], flush=True)
taken = held.accept()[0]
while data := taken.recv(9):
    taken.sendall(data)
"""


def test_grpcs_port_takes_connections_while_the_server_drains() -> None:
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=60) as kept:
            kept.sendall(b"a")
            assert kept.recv(9) == b"a"
            assert not refuse_connections(process.pid, port + 1)
            if not refuse_connections(process.pid, port):
                pytest.skip("this kernel gives nobody another process's sockets")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            kept.sendall(b"b")
            assert kept.recv(9) == b"b"
    finally:
        process.kill()
        process.wait()
    assert not refuse_connections(process.pid, port)
