"""A real tritonserver with one model per engine, from preflight to a clean end."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hemiola.runtime import manifest
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.tritonserver import (
    ANY_PORTS,
    Ports,
    Triton,
    check_python,
    choose_ports,
    find_triton,
    server_environment,
    write_repository,
)

GRACE_S = 10  # for tritonserver to notice that its exit timeout is over
# Asks the kernel to kill the server if we end without stopping it, and becomes the server.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def name_engines(engine_dirs: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """Pairs --engine-dir with --model-name, in order; a single engine is called hemiola."""
    if not names and len(engine_dirs) == 1:
        names = ["hemiola"]
    if len(names) != len(engine_dirs):
        raise Refused(
            f"{len(engine_dirs)} --engine-dir but {len(names)} --model-name; give each engine a name"
        )
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise Refused(
                f"model name {name!r} cannot be a path in a URL; use letters, digits, '_', '-' and '.'"
            )
    if len(set(names)) != len(names):
        raise Refused(f"model names {', '.join(names)} are not all different; give each engine its own")
    return dict(zip(names, engine_dirs, strict=True))


class Server:
    """A running tritonserver, as a context manager: ready when entered, drained and cleaned up when left."""

    def __init__(
        self,
        engines: Mapping[str, Path],  # model name -> engine directory
        *,
        host: str = "127.0.0.1",
        ports: Ports = ANY_PORTS,
        options: Mapping[str, Any] | None = None,  # of LLM, the same for every engine
        tritonserver: Path | None = None,
        log_verbose: bool = False,
        start_timeout_s: float = 300,
        exit_timeout_s: int = 30,
    ) -> None:
        self.engines = dict(engines)
        self.host = host
        self._wanted = ports
        ServeConfig(**(options or {}))  # refused here, not by each engine
        self._options = options or {}
        self._tritonserver = tritonserver
        self._log_verbose = log_verbose
        self._start_timeout_s = start_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._triton: Triton | None = None  # of a check that was done
        self._process: subprocess.Popen[str] | None = None
        self._home: Path | None = None

    @property
    def http_url(self) -> str:
        return f"http://{self._reachable}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reachable}:{self.ports.metrics}/metrics"

    @property
    def _reachable(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> Triton:
        """Refuses what cannot start, before anything does."""
        for engine_dir in self.engines.values():
            manifest.load(engine_dir)
        self._triton = find_triton(self._tritonserver)
        self._environment = server_environment()
        check_python(self._triton, self._environment)
        self.ports = choose_ports(self.host, self._wanted)
        return self._triton

    def start(self) -> None:
        """Returns when every model answers; raises Refused with the reason when one will not."""
        triton = self._triton or self.check()
        self._home = Path(tempfile.mkdtemp(prefix="hemiola-serve-"))
        write_repository(self._home, triton, self.engines, self._options)
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(os.getpid()), *self._command(triton)],
            env=self._environment,
            cwd=self._home / "python",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us; we forward it once
        )
        self._log = Log(self._process, self._log_verbose)
        self._await_ready()

    def _command(self, triton: Triton) -> list[str]:
        return [
            str(triton.server),
            f"--model-repository={self._home}/models",
            f"--backend-directory={self._home}/backends",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--log-verbose={int(self._log_verbose)}",
        ]

    @property
    def _shm_prefix(self) -> str:
        return f"{self._home.name}-" if self._home else ""

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Refused(f"tritonserver did not start: {self._log.reason()}")
            if time.monotonic() > deadline:
                raise Refused(
                    f"tritonserver was not ready after {self._start_timeout_s:g} s (--start-timeout):"
                    f" {self._log.reason()}"
                )
            time.sleep(0.05)
        self._log.ready = True

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=1) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def wait(self) -> None:
        """Until the server ends by itself, which it should not."""
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """Streams in flight may finish for exit_timeout_s; RuntimeError if the server does not end well."""
        if self._process is None:
            return
        before = self._process.poll()
        try:
            self._process.terminate()
            status = self._process.wait(self._exit_timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self.kill()
        if before is not None:
            raise RuntimeError(f"tritonserver ended by itself with {before}: {self._log.reason()}")
        if status != 0:
            how = "had to be killed" if status is None else f"ended with {status}"
            raise RuntimeError(
                f"streams in flight did not end within {self._exit_timeout_s} s (--exit-timeout):"
                f" tritonserver {how}, they are lost"
            )

    def kill(self) -> None:
        """At once, whatever is in flight; leaves no process, shared memory or files behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the stub can outlive the server
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._home is not None:
            for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None


class Log:
    """The server's output, read in a thread: errors are passed on once it is ready, all of it if verbose."""

    def __init__(self, process: "subprocess.Popen[str]", verbose: bool, ready: bool = False) -> None:
        self.ready = ready
        self._lines: deque[str] = deque(maxlen=200)
        self._process = process
        self._verbose = verbose
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._verbose or (self.ready and not re.match(r"[IW]\d{4} |Signal \(", line)):
                sys.stderr.write(line)

    def reason(self) -> str:
        """Why it did not start: what a model said, else the last error, else the last line."""
        text = "".join(self._lines)
        model = r"failed to load '(.*?)' version 1: (?:Internal: TritonModelException: )?(.*?)(?:\\n|\"?\n)"
        found = [": ".join(parts) for parts in re.findall(model, text)]
        found = found or re.findall(r"\nE\d{4} [^\n]*?\] ([^\n]*)", text) or re.findall(r"[^\n]+", text)
        return found[-1] if found else "it said nothing"
