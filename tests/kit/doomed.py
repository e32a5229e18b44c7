"""Builds in processes of their own, which are given too little or are told to end; run as a script.

Reads a line for each, writes one: builds are forked from a process that has imported everything.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    status: int  # less than 0: of this signal
    said: list[str]


class Doomed:
    """A process that forks builds."""

    def __init__(self) -> None:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def build(
        self, *command: str, limit: tuple[str, int] | None = None, end: tuple[str, str] | None = None
    ) -> Ended:
        """limit: of the bytes of a file (RLIMIT_FSIZE) or of what memory may grow by (RLIMIT_AS).
        end: a signal, and the stage of the build in which it comes."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([command, limit, end]) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    import torch._dynamo
    from kit import kernels
    from kit.stages import without_stages

    from hemiola.builder import build, cli  # noqa: F401
    from hemiola.builder.targets import TARGETS  # noqa: F401
    from hemiola.builder.targets.trt import rtx  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                with kernels.uncompiled():
                    _run(*json.loads(line))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([status, without_stages(said.read()).splitlines()]), flush=True)


def _run(command: list[str], limit: tuple[str, int] | None, end: tuple[str, str] | None) -> None:
    from hemiola.builder import build, cli

    whole = build.build

    def told(path: Path, engine_dir: Path, options: build.Options, report: build.Report) -> object:
        def report_and_end(stage: str, done: int, total: int) -> None:
            report(stage, done, total)
            if end and stage.startswith(end[1]):
                os.kill(os.getpid(), getattr(signal, end[0]))

        return whole(path, engine_dir, options, report_and_end)

    build.build = told
    if limit:
        name, most = limit
        if name == "RLIMIT_AS":
            most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(getattr(resource, name), (most, most))
    sys.argv = ["build-engine", *command]
    status = 0
    try:
        cli.main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
