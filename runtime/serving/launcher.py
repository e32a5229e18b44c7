"""A real tritonserver with one model per engine, from preflight to a clean end."""

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hemiola.runtime import outline
from hemiola.runtime.errors import Refused, counted, in_python, one_line, within
from hemiola.runtime.progress import Display, hide, read_report, silent
from hemiola.runtime.serving import ending, heartbeat, settings
from hemiola.runtime.serving.door import Door
from hemiola.runtime.serving.engines import check_sizes
from hemiola.runtime.serving.guard import Guard
from hemiola.runtime.serving.home import Home
from hemiola.runtime.serving.listener import refuse_connections
from hemiola.runtime.serving.local import answers
from hemiola.runtime.serving.log import Log, Printer
from hemiola.runtime.serving.place import choose_gpu, share_memory
from hemiola.runtime.serving.ports import ANY_PORTS, Ports, address_of, are_free, choose_ports
from hemiola.runtime.serving.tritonserver import (
    LAUNCH,
    Switches,
    Triton,
    check_python,
    command_line,
    find_triton,
    server_environment,
    write_repository,
)

DRAINED_S = 1.5  # without a request in flight, then a server that was told to end is at its end
WATCH_S = 0.5  # between looks at the engines
FAREWELL_S = 1.0  # for what a lost engine has said to reach its callers
MOST_FAREWELL_S = 5.0  # for an engine that has raised to say it to all
RECOVERED_S = 600  # of service, after which restarts are counted from 0 again
MOST_WAIT_S = 60
TRIES = 3  # to start
OPEN_S = 120.0  # for a server whose engines are loaded to be ready, which takes a second
READ_S = 10.0  # for the rest of what it said to be read


class NeverOpened(Refused):
    """A tritonserver that has loaded its engines and then does nothing, or aborts (in boost's locks, once in
    some hundred starts): another may well start."""


class Server:
    """A running tritonserver, as a context manager: ready when entered, drained and cleaned up when left."""

    def __init__(
        self,
        engines: Mapping[str, Path],  # model name -> engine directory
        *,
        host: str = "127.0.0.1",
        grpc_host: str | None = None,  # None: the same
        ports: Ports = ANY_PORTS,
        options: Mapping[str, Any] | None = None,  # settings.py, the same for every model
        settings_of: Mapping[str, Mapping[str, Any]] | None = None,  # by model; they override options
        models_file: Path | None = None,  # where settings_of stand
        control_key: str = "",  # who has it may load and unload models
        hang_timeout_s: float = 30,
        tritonserver: Path | None = None,
        log_verbose: bool = False,
        start_timeout_s: float = 300,
        exit_timeout_s: int = 30,
        show: Callable[[], AbstractContextManager[Display]] = hide,  # how far a start is
    ) -> None:
        self.engines = dict(engines)
        self.host = address_of(host)
        self.grpc_host = self.host if grpc_host is None else address_of(grpc_host)
        self._wanted = self.ports = ports  # `check` chooses those that are 0
        self._settings = {
            name: with_paths({**(options or {}), **(settings_of or {}).get(name, {})}, path)
            for name, path in self.engines.items()
        }
        for chosen in self._settings.values():
            settings.split(chosen)  # refused here, not by each model
        self._models_file = models_file
        self._switches = Switches(self.engines, self.grpc_host, control_key, exit_timeout_s, log_verbose)
        self._hang_timeout_s = hang_timeout_s
        self.num_restarts = 0
        self.door_key = secrets.token_hex(16)  # of its doors, which date requests (arrival.py)
        self._tritonserver = tritonserver
        self._log_verbose = log_verbose
        self._start_timeout_s = start_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._show = show
        self._triton: Triton | None = None  # of a check that was done
        self._process: subprocess.Popen[str] | None = None
        self._home: Home | None = None
        self._guard: Guard | None = None
        self.fronts: list[Door] = []  # further doors to it, which whoever made them closes
        self.printer = Printer()

    @property
    def http_url(self) -> str:
        return f"http://{reachable(self.host)}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{reachable(self.grpc_host)}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{reachable(self.host)}:{self.ports.metrics}/metrics"

    def __enter__(self) -> "Server":
        try:
            self._start_first()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    def check(self) -> Triton:
        """Refuses what cannot start, before anything does."""
        outlines = {name: outline.load(engine_dir) for name, engine_dir in self.engines.items()}
        for name, chosen in self._settings.items():
            file = self._models_file
            with within(name) if file is None else within(f"{file}: {name}", in_python):
                engine = outlines[name]
                chosen.update(with_paths(chosen, self.engines[name].resolve()))
                check_sizes(chosen, engine)
                chosen["device"] = choose_gpu(
                    self.engines[name], engine.arch, chosen.get("device"), engine.tp
                )
        share_memory(self._settings.values(), [outlines[name].tp for name in self._settings])
        self._triton = find_triton(self._tritonserver)
        self._environment = server_environment()
        check_python(self._triton, self._environment)
        self.ports = choose_ports(self.host, self._wanted, self.grpc_host)
        return self._triton

    def _start_first(self) -> None:
        """A free port may be somebody else's when tritonserver, with its engines loaded, comes to take it."""
        for left in reversed(range(TRIES)):
            try:
                with self._show() as display:
                    return self.start(display)
            except Refused as error:
                self.kill()
                taken = 0 in self._wanted and not are_free(self.host, self.ports, self.grpc_host)
                if not left or not (taken or isinstance(error, NeverOpened)):
                    raise
                if taken:
                    self.ports = choose_ports(self.host, self._wanted, self.grpc_host)
                else:
                    self.printer.say(f"lost: {error}\nstarting again\n")

    def start(self, display: Display = silent) -> None:
        """Returns when every model answers; raises Refused with the reason when one will not."""
        triton = self._triton or self.check()
        self._guard = Guard(self.host, self.ports, self.door_key)
        self._home = Home()
        write_repository(
            self._home.path,
            triton,
            {
                name: {
                    **chosen,
                    "heartbeat_file": str(self._home.beats / name),
                    "progress_file": str(self._home.stages / name),
                    "num_restarts": self.num_restarts,
                    "door_key": self.door_key,
                }
                for name, chosen in self._settings.items()
            },
        )
        command = command_line(triton, self._home, self.ports, self._switches)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCH, str(os.getpid()), *command],
            env=self._environment,
            cwd=self._home.path / "python",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us; we forward it once
        )
        self._log = Log(self._process, self.printer, self._log_verbose)
        self._await_ready(display)

    def _await_ready(self, display: Display) -> None:
        assert self._process is not None and self._home is not None and self._guard is not None
        loaded = time.monotonic()  # not before then
        deadline = loaded + self._start_timeout_s
        http, metrics = (self._home.doors / name for name in ("http", "metrics"))
        while not (answers(http, "/v2/health/ready") and answers(metrics, "/metrics")):
            display("starting tritonserver", 0, 0)
            for name in self.engines:
                if report := read_report(self._home.stages / name):
                    display(*report, subject=name)
            status = self._process.poll()
            if status is not None:
                self.kill()  # whoever else holds its log open
                ended = "" if status == 1 else f" (it ended with {status})"  # 1: it says why
                kind = NeverOpened if status == -signal.SIGABRT else Refused
                raise kind("failed", message=f"tritonserver did not start{ended}: {self._log.reason(READ_S)}")
            now = time.monotonic()
            if now > deadline:
                message = (
                    f"tritonserver was not ready after {self._start_timeout_s:g} s (--start-timeout):"
                    f" {self._log.reason()}"
                )
                way_out = "raise it, or start again: kernels that are compiled by then are kept"
                raise Refused("failed", message=message, way_out=way_out)
            if not all(path.exists() for path in self._beats()):
                loaded = now
            if now - loaded > OPEN_S:
                message = f"tritonserver has loaded its engines, but opened no door within {OPEN_S:g} s"
                raise NeverOpened("failed", message=message, way_out="start it again")
            time.sleep(0.05)
        self._home.environments.note()
        for front in self.fronts:
            front.reason = ""  # why the server before was lost
        self._guard.start({"http": http, "metrics": metrics})
        self._log.ready = True

    def serve(self, restarts: int = 0) -> None:
        """Until it is interrupted. A lost server starts again so many times in a row, then RuntimeError."""
        left, since = restarts, time.monotonic()
        while True:
            reason = self.wait()
            if time.monotonic() - since > RECOVERED_S:
                left = restarts
            if restarts == 0:
                raise RuntimeError(reason)
            while not self._started_again(reason, left, restarts):
                left -= 1
            left, since = left - 1, time.monotonic()

    def _started_again(self, reason: str, left: int, restarts: int) -> bool:
        self.kill()
        if left == 0:
            tried = counted(restarts, "restart", "restarts")
            raise RuntimeError(f"{reason}; {tried} (--restart) did not help")
        seconds = min(2 ** (restarts - left), MOST_WAIT_S)
        self.printer.say(
            f"lost: {reason}\nstarting again in {seconds} s ({restarts - left + 1} of {restarts})\n"
        )
        time.sleep(seconds)
        self.num_restarts += 1
        try:
            self.start()
        except (Refused, OSError) as error:  # a full disk, no process left: perhaps not for long
            self.printer.say(f"lost again: {one_line(error)}\n")
            return False
        except KeyboardInterrupt:
            self.kill()  # nothing is in flight
            raise
        self.printer.say("ready again\n")
        return True

    def wait(self) -> str:
        """Until the server is lost, by itself or with an engine; why."""
        assert self._process is not None
        answered, awake = time.monotonic(), heartbeat.Awake()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(WATCH_S)
                self._tell("tritonserver ended by itself")
                self.kill()
                return f"tritonserver ended by itself with {status}: {self._log.reason(READ_S)}"
            if self._home is not None and answers(self._home.doors / "http", "/v2/health/live"):
                answered = time.monotonic()
            reason = self._trouble(time.monotonic() - answered, self._hang_s(awake))
            if reason:
                self._hear_out()
                self._tell(reason)
                self.kill()  # nothing else ends streams whose engine is gone
                return reason

    def _hang_s(self, awake: heartbeat.Awake) -> float:
        """For so long nobody may stand still; for ever, if we have not looked for as long ourselves."""
        return self._hang_timeout_s if awake.look() > self._hang_timeout_s else math.inf

    def _hear_out(self) -> None:
        """An engine that has raised ends its streams with an error; one that is dead or hangs, none."""
        end = time.monotonic() + MOST_FAREWELL_S
        while time.monotonic() < end and any(
            beat.failure and beat.num_open for beat in map(heartbeat.read, self._beats()) if beat
        ):
            time.sleep(heartbeat.BEAT_S)
        time.sleep(FAREWELL_S)

    def _trouble(self, silent_s: float, hang_s: float) -> str:
        for path in self._beats():
            reason = heartbeat.trouble(path, hang_s)
            if reason:
                return reason
        if silent_s > hang_s:
            return f"tritonserver answers nobody for {silent_s:.0f} s (--hang-timeout)"
        return ""

    def refuse(self) -> None:
        """Nothing new is taken from now on, at any door; does not wait."""
        for door in self._doors:
            door.refuse()
        if self._home is not None:
            ending.begin(self._home.beats)
        if self._process is not None:
            refuse_connections(self._process.pid, self.ports.grpc)

    def stop(self) -> None:
        """Requests in flight may finish for exit_timeout_s; RuntimeError if some did not."""
        if self._process is None:
            self.kill()
            return
        before = self._process.poll()
        self.refuse()
        try:
            self._process.terminate()
            lost = self._drain()
            self._tell(lost)
        finally:
            self.kill()
        if before is not None:
            raise RuntimeError(f"tritonserver ended by itself with {before}: {self._log.reason(READ_S)}")
        if lost:
            raise RuntimeError(lost)

    def _drain(self) -> str:
        """Until the server has ended, or has nothing to say any more; what is lost.

        Tritonserver also waits for idle connections, as clients keep them, for requests of callers that
        left in the wrong moment, and for engines that have died: it is not left to decide.
        """
        assert self._process is not None
        end = time.monotonic() + self._exit_timeout_s
        quiet, awake = time.monotonic(), heartbeat.Awake()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(0.1)
                return "" if status == 0 else f"requests in flight are lost: tritonserver ended with {status}"
            num_open, num_lost, reason = self._in_flight(self._hang_s(awake))
            now = time.monotonic()
            if num_open:
                quiet = now
            if now - quiet > DRAINED_S:
                return _lost(num_lost, reason)
            if now > end:
                late = f"not ended within {self._exit_timeout_s} s (--exit-timeout)"
                return _lost(num_open + num_lost, late)

    def _in_flight(self, hang_s: float) -> tuple[int, int, str]:
        """Requests that may still end, those that cannot, and why."""
        num_open, num_lost, reason = 0, 0, ""
        for path in self._beats():
            beat = heartbeat.read(path)
            if beat is not None and (trouble := heartbeat.trouble(path, hang_s)):
                num_lost, reason = num_lost + beat.num_open, trouble
            elif beat is not None:
                num_open += beat.num_open
        return num_open, num_lost, reason

    def _beats(self) -> list[Path]:
        return [self._home.beats / name for name in self.engines] if self._home else []

    @property
    def _doors(self) -> list[Door]:
        return [*([self._guard] if self._guard else []), *self.fronts]

    def _tell(self, reason: str) -> None:
        """Why streams are cut, if they are; the first reason stays."""
        for door in self._doors:
            door.reason = door.reason or reason

    def kill(self) -> None:
        """At once, whatever is in flight; leaves no process, shared memory or files behind."""
        self._tell("the server was ended")
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the stub can outlive the server
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._home is not None:
            self._home.remove()
            self._home = None
        self.printer.flush()


def with_paths(model_settings: Mapping[str, Any], engine_dir: Path) -> dict[str, Any]:
    """Settings whose paths tritonserver finds, which has a folder and a Python of its own."""
    paths = {"engine_dir": str(engine_dir.absolute())}
    if (folder := model_settings.get("disk_cache_dir")) and isinstance(folder, str):
        paths["disk_cache_dir"] = str(Path(folder).absolute())
    for name, path in paths.items():
        if not path.isascii():
            limit, way_out = "and tritonserver finds paths in ASCII only", "choose another folder"
            raise Refused("unsupported", name, path, limit, way_out)
    return {**model_settings, **paths}


def reachable(host: str) -> str:
    """An address of this machine at which it answers there."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _lost(num: int, reason: str) -> str:
    return f"{counted(num, 'request in flight is', 'requests in flight are')} lost: {reason}" if num else ""
