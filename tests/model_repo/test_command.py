"""`hemiola serve` from start to end, as a process."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import requests
from kit.served import ENVIRONMENT, HEMIOLA, SERVE, Served, descendants, until
from kit.triton_calls import joined

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.home import remove_stale

pytestmark = pytest.mark.server

DRAINED = "waiting for streams in flight\nstopped\n"


def home_of(process: subprocess.Popen[str]) -> Path:
    """The folder that this server, among others on this machine, was given."""
    server = next(iter(descendants(process.pid)))
    command = Path(f"/proc/{server}/cmdline").read_text()
    return Path(re.search(r"--model-repository=(\S+?)/models", command).group(1))


def leftovers(home: Path) -> list[Path]:
    return [*Path("/dev/shm").glob(f"{home.name}*"), *home.parent.glob(home.name)]


@pytest.fixture
def own_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server that is killed leaves behind, no other one that starts meanwhile removes."""
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False


def test_sigterm_lets_a_stream_finish_and_leaves_nothing_behind(
    engine_dirs: dict[str, Path], llm: LLM
) -> None:
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    arguments = (f"--engine-dir={engine_dirs['hemiola']}", "--model-name=mine", "--max-rows=2")
    with Served(*arguments) as served:
        home = home_of(served.process)
        assert len(leftovers(home)) == 6, "region, beats, stages, sockets, owner, itself"
        others_read = [path for path in leftovers(home) if path.stat().st_mode & 0o077]
        assert not others_read, "requests pass through them"
        with Client(served.grpc_url, "mine") as client:
            stream = client.stream("def ", params)
            pieces = [next(stream)]
            served.process.send_signal(signal.SIGTERM)
            pieces += stream
        assert served.ended() == (0, DRAINED, "")
    assert joined(pieces)[0] == llm.generate(["def "], params)[0].token_ids
    assert not leftovers(home)
    with pytest.raises(Refused, match=f"no server answers at {served.grpc_url} .*; start `hemiola serve`"):
        Client(served.grpc_url, "mine")


def test_sigint_in_the_background_is_ignored_and_one_that_comes_twice_ends_streams(
    engine_dirs: dict[str, Path],
) -> None:
    as_a_job = ("sh", "-c", 'trap "" INT; exec "$@"', "sh", *HEMIOLA)  # as sh starts one with &
    with Served(f"--engine-dir={engine_dirs['hemiola']}", hemiola=as_a_job) as served:
        with Client(served.grpc_url) as client:
            stream = client.stream("def ", SamplingParams(max_tokens=150, ignore_eos=True))
            next(stream)
            for _ in range(3):  # as `timeout` does
                served.process.send_signal(signal.SIGINT)
            assert [*stream][-1].finish_reason == "length"
        assert served.ended() == (0, DRAINED, "")


def test_killed_tritonserver_ends_the_command_and_the_engine_with_it(engine_dirs: dict[str, Path]) -> None:
    with Served(f"--engine-dir={engine_dirs['hemiola']}", "--restart=0") as served:
        home = home_of(served.process)
        (server, *others) = descendants(served.process.pid)
        assert others, "the engine runs in a process of its own"
        os.kill(server, signal.SIGKILL)
        status, _, err = served.ended()
    assert status == 1 and re.fullmatch(r"error: tritonserver ended by itself with -9: .*\n", err)
    until(lambda: not any(map(alive, others)))
    assert not leftovers(home)


@pytest.mark.usefixtures("own_homes")
@pytest.mark.parametrize("engine", ["is stopped", "finalizes"])
def test_killed_command_takes_tritonserver_and_the_engine_with_it(
    engine_dirs: dict[str, Path], engine: str
) -> None:
    served = Served(f"--engine-dir={engine_dirs['hemiola']}")
    process, family, home = served.process, descendants(served.process.pid), home_of(served.process)
    assert len(family) == 3, family
    with Client(served.grpc_url, retries=0) as client:
        params = SamplingParams(max_tokens=900, ignore_eos=True, num_drafts=0)
        first, *_others, stream = [client.stream("in flight", params) for _ in range(64)]  # they make it last
        next(first)
        if engine == "is stopped":
            os.kill(served.pid(), signal.SIGSTOP)
        if engine == "finalizes":
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        process.kill()
        with pytest.raises(RuntimeError, match=f"the server (at {served.grpc_url}: |is shutting down)"):
            list(stream)
    served.ended()
    until(lambda: not any(map(alive, family)))
    assert leftovers(home), "nobody was left to do it"
    remove_stale()  # as the next one that starts does
    assert not leftovers(home)


@pytest.mark.parametrize(("signal_", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])
def test_a_command_that_ends_while_it_loads_takes_all_with_it(
    engine_dirs: dict[str, Path], signal_: int, status: int
) -> None:
    command = [*SERVE, f"--engine-dir={engine_dirs['hemiola']}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, cwd="/", **pipes) as process:
        until(lambda: "triton_python_b" in descendants(process.pid).values())
        family, home = descendants(process.pid), home_of(process)
        process.send_signal(signal_)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (status, "") and "ready" not in out
    until(lambda: not any(map(alive, family)))
    until(lambda: remove_stale() or not leftovers(home))  # others that start do so, too, at the same time


def test_a_second_sigterm_ends_everything_at_once(engine_dirs: dict[str, Path]) -> None:
    doors = ("--host=localhost", "--openai-port=0")  # tritonserver itself understands no name
    arguments = (f"--engine-dir={engine_dirs['hemiola']}", *doors, "--exit-timeout=200")
    body = {"model": "hemiola", "prompt": ["in flight"] * 64, "max_tokens": 900, "stream": True}
    with Served(*arguments) as served:
        process, family, home = served.process, descendants(served.process.pid), home_of(served.process)
        url = f"{served.openai_url}/completions"
        with requests.post(url, json=body, stream=True, timeout=60) as stream:
            next(stream.iter_content(1))
            os.kill(served.pid(), signal.SIGSTOP)  # it will not finish
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "waiting for streams in flight\n"
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert served.ended() == (130, "", "")
            with contextlib.suppress(requests.RequestException):
                assert b"[DONE]" not in stream.content
    until(lambda: not any(map(alive, family)))
    assert not leftovers(home)


@pytest.mark.parametrize("moment", ["it waits", "it loads"])
def test_sigterm_during_a_restart_ends_it(engine_dirs: dict[str, Path], moment: str) -> None:
    with Served(f"--engine-dir={engine_dirs['hemiola']}", "--restart=3") as served:
        pid = served.process.pid
        os.kill(served.pid(), signal.SIGKILL)
        until(lambda: "starting again in 1 s (1 of 3)\n" in served.said)
        if moment == "it loads":
            until(lambda: "triton_python_b" in descendants(pid).values())
        family, said = descendants(pid), served.said
        served.process.send_signal(signal.SIGTERM)
        assert served.ended() == (0, DRAINED, said)
    assert said.count("\n") == 2
    until(lambda: not any(map(alive, family)))


def refused(*arguments: str) -> str:
    ended = subprocess.run([*SERVE, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def test_tampered_engine_is_refused_before_the_server_starts(
    engine_dirs: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(engine_dirs["hemiola"], broken)
    with (broken / "weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    message = refused(f"--engine-dir={broken}")
    assert message.startswith(f"error: {broken}/weights.safetensors was changed after the build")


def test_taken_port_is_refused_by_name(engine_dirs: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(f"--engine-dir={engine_dirs['hemiola']}", f"--grpc-port={port}")
    assert f"grpc port {port} on 127.0.0.1 cannot be used" in message
    assert "--grpc-port" in message


def test_what_an_engine_refuses_when_it_loads_is_one_line(engine_dirs: dict[str, Path]) -> None:
    """Known to the model only: it comes through tritonserver's log."""
    message = refused(f"--engine-dir={engine_dirs['hemiola']}", "--num-pages=1000000000")
    assert re.fullmatch(
        r"error: tritonserver did not start: hemiola: there is no memory for .*: they take \d+ bytes,"
        r" and \d+ are free; .*\n",
        message,
    )
