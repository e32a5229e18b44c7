"""Every command and every example of README.md and docs/*.md runs, and says what its page shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.manual import PAGES, ROOT, SERVE, Block, blocks, check_said, commands, serve_options
from kit.served import Served

pytestmark = pytest.mark.server

KINDS = {"", "text", "python"}
NOT_RUN = {  # and why
    "git clone THIS-REPOSITORY hemiola && cd hemiola": "the pages run in a copy of this checkout",
    "python3 -m venv .venv && . .venv/bin/activate": "this Python is used instead",
    "pip install -c constraints.txt -e '.[serve]'": "it would change the environment of this test",
    "pip install '.[client]'": "tests/runtime/serving/test_client_alone.py does, offline",
    "ENGINE_DIR=$PWD/engines/qwen docker compose -f docs/deploy/compose.yaml up --build": "no docker in CI;"
    " tests/model_repo/test_deploy.py reads what it starts",
    "build-engine demo/qwen3.5-code --engine-dir engines/qwen-rtx --target tensorrt-rtx"
    " --arch sm_89,sm_120,sm_121": "76 s; tests/builder/targets/trt/test_rtx.py builds smaller ones",
    '"$triton"/bin/tritonserver --model-repository=triton_models --backend-directory=$PWD/triton_backends'
    " --disable-auto-complete-config": "it does not end; tests/model_repo/test_deploy.py starts it",
    "build-engine Qwen/Qwen3.5-0.8B --engine-dir engines/qwen3.5-0.8b": "no network",
    "hemiola chat engines/qwen3.5-0.8b": "no checkpoint",
    "build-engine Qwen/Qwen3.5-9B --engine-dir engines/qwen3.5-9b --arch sm_90": "no network",
    "hemiola serve engines/qwen3.5-9b --openai-port 9000": "no checkpoint",
    "hemiola bench --random-weights benchmarks/configs/qwen3.5-0.8b --max-len 1024 --max-rows 4"
    " --max-step-tokens 512 --num-requests 4": "3 GB of weights; tests/runtime/cli/test_bench.py has fewer",
}
DYNAMO = "no ai-dynamo in CI; tests/runtime/dynamo/test_cluster.py starts the same where it is"
NOT_RUN |= dict.fromkeys(
    [
        "python3 -m venv .dynamo && . .dynamo/bin/activate",
        "pip install -c <(grep -v ^pydantic constraints.txt) -e '.[dynamo]'"
        " && pip install --no-deps ai-dynamo==1.6.1",
        "export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$PWD/cluster DYN_TCP_RPC_HOST=127.0.0.1"
        " DYN_EVENT_PLANE_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1",
        "python -m dynamo.frontend --router-mode kv --migration-limit 3 --http-host 127.0.0.1"
        " --http-port 9100 &",
        "for n in 1 2 3; do hemiola dynamo-worker engines/qwen & done",
        "curl -N -H 'Content-Type: application/json' 127.0.0.1:9100/v1/completions -d '{\"model\":"
        ' "hemiola", "prompt": "def ", "max_tokens": 900, "temperature": 0, "stream": true}\'',
    ],
    DYNAMO,
)
NO_COMMANDS = {"docs/bench.md": '{"prompt": "TEXT"'}  # blocks of a file's lines
SHORTER = {"hemiola bench": "--num-requests 4 --turns 2"}  # of two options, the last counts
DEFAULT = f"{SERVE}--engine-dir engines/qwen"  # where a page's commands need a server and it starts none
BUILD = "build-engine demo/qwen3.5-code --engine-dir engines/qwen"
OUTSIDE = re.compile(r"[\s=](~|/(etc|home|opt|root|srv|var))/")
ASLEEP = re.compile(
    r"lost: tritonserver has loaded its engines, but opened no door[^\n]*\nstarting again\n"
)  # rare
SHIM = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a newcomer has it, but for what is built there: engines are ours."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("engines", "scripts", "out.json") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / ".curlrc").write_text("silent")  # it shows progress to those who are no terminal
    (folder / "bin").mkdir()
    modules = {"hemiola": "hemiola", "build-engine": "hemiola.builder", "python": ""}
    for name, module in modules.items():
        shim = folder / "bin" / name
        shim.write_text(SHIM.format(python=sys.executable, module=module).replace("-m  ", ""))
        shim.chmod(0o755)
    shutil.copytree(ROOT / "scripts", folder / "scripts")  # which build engines beside themselves
    return folder


@pytest.fixture(scope="module")
def shell(checkout: Path) -> Callable[[str], str]:
    """Runs a script to its end; what it said."""
    path = f"{checkout}/bin:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CURL_HOME": str(checkout)}

    def run(script: str) -> str:
        ran = subprocess.run(
            ["bash", "-ec", script + "\nwait"], env={**os.environ, **own}, cwd=checkout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script}\n{ran.stdout}"
        return ran.stdout

    return run


@pytest.fixture(scope="module")
def serve(checkout: Path) -> Iterator[Callable[[str], Served]]:
    """The server that a command starts; kept for the pages that start the same."""
    running: dict[str, Served] = {}

    def start(command: str) -> Served:
        key = " ".join(shlex.split(command, comments=True))
        if key not in running:
            running[key] = Served(*serve_options(command), cwd=checkout)
        return running[key]

    yield start
    ended = [(server.end(), ASLEEP.sub("", server.said)) for server in running.values()]
    shutil.rmtree(checkout / "engines/prefixes", ignore_errors=True)  # a gigabyte
    assert ended == [(0, "")] * len(running)


@pytest.fixture(scope="module", autouse=True)
def engine(shell: Callable[[str], str]) -> None:
    """For all pages: they begin with this command, or need what it made."""
    shell(BUILD)


def is_run(block: Block, page: str) -> bool:
    return not (block.kind == "text" or (page in NO_COMMANDS and block.text.startswith(NO_COMMANDS[page])))


def shortened(command: str) -> str:
    return next(
        (f"{command} {more}" for start, more in SHORTER.items() if command.startswith(start)), command
    )


def test_a_page_filled_the_disk_of_the_machine_outside_the_checkout() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert not (is_run(block, page) and OUTSIDE.search(block.text)), f"{page}: {block.text}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(
    page: str,
    shell: Callable[[str], str],
    serve: Callable[[str], Served],
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(checkout)
    started = DEFAULT
    for block in (block for block in blocks(page) if is_run(block, page)):
        place = f"{page}:{block.line}"
        assert block.kind in KINDS, f"{place}: who runs a block of {block.kind}?"
        script = commands(block.text)
        lines = [shortened(command) for command in script if command not in (*NOT_RUN, BUILD)]
        said, code = "", block.text
        if block.kind == "":
            at = next((i for i, command in enumerate(lines) if command.startswith(SERVE)), -1)
            if at >= 0:
                shell("\n".join(lines[:at]))
                started = lines[at]
                said = serve(started).printed
            code = "\n".join(lines[at + 1 :])
        if "localhost:" in code or "127.0.0.1:" in code:
            code = serve(started).addressed(code)
        if block.kind == "python":
            capfd.readouterr()
            exec(compile(code, place, "exec"), {"__name__": "__main__"})
            said = capfd.readouterr().out
            assert said.strip() or "print(" not in code, place
        elif code:
            said = shell(code)
        if block.shown and lines:
            check_said(said, block.shown)
        else:
            assert '"error"' not in said, place


def test_what_is_not_run_still_stands_there() -> None:
    there = {command for page in PAGES for block in blocks(page) for command in commands(block.text)}
    assert set(NOT_RUN) | {BUILD, DEFAULT} <= there
