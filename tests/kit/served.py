"""A `hemiola serve` as a process, and what belongs to it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
HEMIOLA = (sys.executable, "-m", "hemiola.runtime")
PORTS = ("serve", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--start-timeout=900")
SERVE = [*HEMIOLA, *PORTS]

# What tritonserver 2.51 does where an engine's process gets no processor for a second while it holds a lock.
STARVED = (
    "lost: tritonserver did not start (it ended with -6):   what():  boost::interprocess::lock_exception"
)


class Served:
    """Ready when made; `said` is what it wrote to stderr, unless that is a file of the caller's."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path = Path("/"),
        log: int | None = None,
        hemiola: Sequence[str] = HEMIOLA,
    ) -> None:
        self.process = subprocess.Popen(
            [*hemiola, *PORTS, *arguments],
            env=ENVIRONMENT,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else log,
            text=True,
        )
        self.said = ""
        self.printed = ""
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        while not re.search(r"^ready after", self.printed, re.MULTILINE):
            line = self.process.stdout.readline()
            assert line, self.said
            self.printed += line
        self.http_url = re.search(r"^HTTP +(http://[^/]+)", self.printed, re.MULTILINE).group(1)
        self.grpc_url = re.search(r"^gRPC +(\S+)$", self.printed, re.MULTILINE).group(1)
        self.metrics_url = re.search(r"^metrics +(\S+)$", self.printed, re.MULTILINE).group(1)
        openai = re.search(r"^OpenAI +(\S+)$", self.printed, re.MULTILINE)
        self.openai_url = openai.group(1) if openai else ""

    def addressed(self, text: str) -> str:
        """What a page says of the usual ports, for ours."""
        found = {8000: self.http_url, 8001: f"//{self.grpc_url}", 8002: self.metrics_url}
        if self.openai_url:
            found[9000] = self.openai_url
        ports = {usual: re.search(r"//[^:]+:(\d+)", url).group(1) for usual, url in found.items()}
        return re.sub(r"((?:localhost|127\.0\.0\.1):)(\d+)", lambda m: m[1] + ports[int(m[2])], text)

    def _read(self) -> None:
        lines = iter(self.process.stderr or ())
        for line in lines:
            if line.startswith(STARVED):
                next(lines, "")  # it starts again, by itself
            else:
                self.said += line

    def read_all(self) -> None:
        """What it said before it ended."""
        self._reader.join(60)

    def pid(self, word: str = "models/hemiola/") -> int:
        """By a word of its command: bin/tritonserver, or models/NAME/ for an engine."""
        (found,) = [
            pid
            for pid in descendants(self.process.pid)
            if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("--model-repository=", "")
        ]
        return found

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        print(self.said)  # for who reads of a failure

    def ended(self) -> tuple[int, str, str]:
        """Its status when it has ended, and what it wrote to stdout and stderr since it was ready."""
        status = self.process.wait(300)
        self.read_all()
        return status, self.process.stdout.read(), self.said

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(300)
            self.read_all()
            return status
        finally:
            self.process.kill()


def descendants(pid: int) -> dict[int, str]:
    """pid -> name, of children and theirs."""
    found = {}
    with contextlib.suppress(OSError):  # one that ends while we look is none
        for task in Path(f"/proc/{pid}/task").glob("*"):
            for child in (int(word) for word in (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    found |= {child: Path(f"/proc/{child}/comm").read_text().strip()} | descendants(child)
    return found


def until(done: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.03)  # what is asked may cost 10 ms itself
