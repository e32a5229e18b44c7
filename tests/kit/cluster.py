"""A real Dynamo frontend and workers of an engine, on one machine, over files and TCP of the loopback."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv/cluster"  # made by scripts/cluster.py
LIMIT_S = 300.0
# Prefixes count for more than even load, and a conversation that its caller names stays where it is.
ROUTER = (
    *("--router-prefill-load-scale", "16"),
    *("--router-session-affinity-ttl-secs", "600", "--router-session-affinity-mode", "soft"),
)


def dynamo_python() -> Path | None:
    """A Python that has Dynamo's frontend, and hemiola."""
    if find_spec("dynamo") is not None and find_spec("dynamo.frontend") is not None:
        return Path(sys.executable)
    found = ENVIRONMENT / "bin/python"
    return found if (ENVIRONMENT / "needs").is_file() else None


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.1)


def free_port() -> int:
    """Below 2**15: Dynamo reads DYN_SYSTEM_PORT as a signed number of 16 bits."""
    while True:
        port = secrets.randbelow(10_000) + 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Member:
    """A worker."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    port: int  # of its health and metrics
    door: Path  # see told_worker.py

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def health(self) -> int:
        """The status of /health; 0: nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def would_start(self, ids: Sequence[int], salt: str) -> tuple[int, int] | None:
        """Its id, and behind how many tokens of a prompt it would start now; None: it does not say."""
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.settimeout(5)
                door.connect(str(self.door))
                door.sendall(json.dumps([ids, salt]).encode() + b"\n")
                worker, tokens = json.loads(door.makefile().read())
        except (OSError, ValueError):
            return None
        return worker, tokens

    def gauge(self, name: str) -> float | None:
        """The value of a gauge of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")]
        return found[0] if found else None


class Cluster:
    """Ends all that it started. options: of the workers. router: of the frontend. tells: workers say where
    they would start (told_worker.py)."""

    def __init__(
        self,
        python: Path,
        engine_dir: Path,
        folder: Path,
        *options: str,
        router: Sequence[str] = ROUTER,
        tells: bool = False,
    ) -> None:
        self.python, self.engine_dir, self.folder, self.options = python, engine_dir, folder, options
        self._router = router
        told = [str(ROOT / "tests/kit/told_worker.py")]
        self._program = told if tells else ["-m", "hemiola", "dynamo-worker"]
        self.store = folder / "store"
        self.port = free_port()
        self.members: list[Member] = []
        self.frontend: subprocess.Popen[bytes] | None = None
        local = ("TCP_RPC_HOST", "EVENT_PLANE_HOST", "TCP_RESPONSE_STREAM_HOST", "SYSTEM_HOST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        self.env = kept | {f"DYN_{name}": "127.0.0.1" for name in local}
        self.env |= {"DYN_FILE_KV": str(self.store), "DYN_DISCOVERY_BACKEND": "file", "OMP_NUM_THREADS": "1"}
        self.env |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_SELF_HOST_METADATA": "0"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Cluster":
        home = self.folder / "home"  # where the frontend keeps model cards
        home.mkdir(parents=True)
        command = ["-m", "dynamo.frontend", "--router-mode", "kv", "--migration-limit", "9"]
        command += [*self._router, "--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.frontend = self._start(command, self.folder / "frontend.log", {"HOME": str(home)})
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.process.kill()
        if self.frontend is not None:
            self.frontend.kill()
        for process in (self.frontend, *(member.process for member in self.members)):
            if process is not None:
                process.wait()

    def _start(self, command: list[str], log: Path, extra: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            words = [self.python, *command]
            return subprocess.Popen(words, cwd=ROOT, env=self.env | extra, stdout=file, stderr=file)

    def add(self, *options: str) -> Member:
        """Start a worker; `await_workers` waits until the frontend knows it."""
        name, port = f"worker{len(self.members)}", free_port()
        command = [*self._program, str(self.engine_dir), *self.options, *options]
        log, door = self.folder / f"{name}.log", self.folder / f"{name}.door"
        process = self._start(command, log, {"DYN_SYSTEM_PORT": str(port), "TOLD_DOOR": str(door)})
        self.members.append(Member(name, process, log, port, door))
        return self.members[-1]

    def kill(self, member: Member) -> None:
        """As a machine that loses power: nothing is said to anybody."""
        member.process.send_signal(signal.SIGKILL)
        member.process.wait()

    def drain(self, member: Member) -> None:
        member.process.send_signal(signal.SIGTERM)

    def instances(self) -> list[int]:
        """Ids of the workers that the frontend knows."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                found = json.load(answer).get("instances", [])
        except OSError:
            return []
        return [one["instance_id"] for one in found if one.get("endpoint") == "generate"]

    def await_workers(self, num: int) -> None:
        def ready() -> bool:
            ended = [m for m in self.members if m.process.poll() not in (None, -9, 0)]
            assert not ended, ended[0].log.read_text()[-2000:]
            return len(self.instances()) == num and self._has_model()

        until(ready, f"{num} workers")

    def _has_model(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
