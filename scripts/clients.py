"""Runs the quick start of each third-party client against `hemiola serve`, each in an environment of its own.

    make clients [CLIENTS="langchain_agent litellm_chat"]

A client is a file of tests/clients/; its first line names what it installs. Environments stay in
.venv/clients and are made again when that line changes. Exit status 1 if a client fails.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hemiola.runtime.progress import show
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.openai.app import FrontLimits
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import read_model

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "demo/qwen3.5-code"
LIMIT_S = 900


def environment(client: Path) -> Path:
    """The folder of commands that the client needs first on its PATH."""
    needs = client.read_text().partition("\n")[0].removeprefix("# needs:").split()
    folder = ROOT / ".venv/clients" / client.stem
    stamp = folder / "needs"
    if not stamp.is_file() or stamp.read_text().split() != needs:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if needs:
            print(f"installing {', '.join(needs)} into {folder.relative_to(ROOT)}", flush=True)
            install = [folder / "bin/pip", "install", "-q", "--disable-pip-version-check", *needs]
            subprocess.run(install, check=True)
        stamp.write_text(" ".join(needs))
    return folder / "bin"


def run(client: Path, addresses: dict[str, str]) -> tuple[bool, str]:
    """Whether it succeeded, and the last line that it printed."""
    path = f"{environment(client)}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = ["bash" if client.suffix == ".sh" else "python", str(client)]
    ran = subprocess.run(
        command, env={**kept, **addresses, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    lines = ran.stdout.strip().splitlines() or [""]
    if ran.returncode:
        print(ran.stdout, file=sys.stderr)
    return ran.returncode == 0, lines[-1]


def main(names: list[str]) -> int:
    clients = sorted((ROOT / "tests/clients").iterdir())
    chosen = [client for client in clients if not names or client.stem in names]
    unknown = set(names) - {client.stem for client in chosen}
    if unknown:
        known = ", ".join(client.stem for client in clients)
        print(f"error: no client {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    table, failed, console = Table("client", "result", "last line"), 0, Console()
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        build = [sys.executable, "-m", "hemiola.builder", str(CHECKPOINT), "--engine-dir", str(engine)]
        print(f"building an engine of {CHECKPOINT.relative_to(ROOT)}", flush=True)
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        model = read_model("hemiola", engine)
        front = Front({"hemiola": model}, limits=FrontLimits())
        with Server({"hemiola": engine}, show=partial(show, True)) as server:
            front.start(server.grpc_url, server.metrics_url)
            addresses = {
                "OPENAI_BASE_URL": front.url,
                "TRITON_HTTP": server.http_url.removeprefix("http://"),
                "TRITON_GRPC": server.grpc_url,
                "TOKENIZER": str(CHECKPOINT),
            }
            for client in chosen:
                console.print(f"{client.name} ...")
                passed, line = run(client, addresses)
                failed += not passed
                table.add_row(client.stem, "passed" if passed else "FAILED", line)
            front.stop()
    console.print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
