"""`hemiola serve` as a command; tests/model_repo has the real one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from hemiola.runtime.cli import serve
from hemiola.runtime.cli.options import spelled
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install
from hemiola.runtime.serving import launcher
from hemiola.runtime.serving.options import OpenaiOptions

ROOT = Path(__file__).resolve().parents[3]
KEY = "HEMIOLA_OPENAI_API_KEY"
# As where the extra is not installed.
WITHOUT = """
import sys

class Without:
    def find_spec(name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Without)
if "pytriton" in missing:
    sys.modules["pytriton"] = None  # is only looked for
from hemiola.runtime.__main__ import main
main()
"""

# What the command does in its own process, up to the start of tritonserver.
CHECKED = """
import sys
from pathlib import Path
from hemiola.runtime.cli.serve import FrontPlan
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.options import OpenaiOptions
server = Server({"hemiola": Path(sys.argv[1])}, options={"max_rows": 2})
server.check()
assert FrontPlan(OpenaiOptions(openai_port=0), {}, 1).front(server)
print(*{"torch", "numba", "hemiola.plugins"} & {*sys.modules})
"""


@pytest.fixture
def refused(
    hemiola: Callable[..., Any], engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """What `hemiola serve` says to these options, without a server having been started."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(launcher.Server, "start", started)

    def run(*options: object, engine: bool = True) -> str:
        free = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
        ended = hemiola("serve", *(["--engine-dir", engine_dir] if engine else []), *free, *options)
        assert (ended.status, ended.out) == (2, "") and ended.err.count("\n") == 1, ended
        return ended.err.removeprefix("error: ").rstrip()

    return run


def test_every_option_of_an_engine_is_an_option_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(launcher, "Server", lambda engines, **settings: made.append((engines, settings)))
    monkeypatch.setattr(serve, "_serve", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command = typer.Typer()
    command.command()(serve.serve)
    given = {
        name: spelled(field.default)
        for name, field in ServeConfig.model_fields.items()
        if field.default is not None
    }
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    command(args=["--engine-dir", "a", *arguments, "--max-rows", "4"], standalone_mode=False)
    ((engines, settings),) = made
    assert engines == {"hemiola": Path("a")}
    assert ServeConfig(**settings["options"]) == ServeConfig(max_rows=4)
    command(args=["--engine-dir", "a"], standalone_mode=False)
    assert made[1][1]["options"] == {}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, hemiola: Callable[..., Any]) -> Callable[..., dict[str, Path]]:
    """The engines that `hemiola serve` would serve with these arguments."""
    made: list[dict[str, Path]] = []
    monkeypatch.setattr(launcher, "Server", lambda engines, **settings: made.append(engines))
    monkeypatch.setattr(serve, "_serve", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: object) -> dict[str, Path]:
        assert hemiola("serve", *arguments) == (0, "", "")
        return made.pop()

    return run


def test_engines_are_not_options_here_and_arguments_elsewhere(served: Callable[..., dict[str, Path]]) -> None:
    a, b = Path("a"), Path("b")
    assert served("a") == served("--engine-dir", "a") == served("--max-rows", 4, "a") == {"hemiola": a}
    names = ("--model-name", "x", "--model-name", "y")
    assert served("a", "b", *names) == served("--engine-dir=a", "--engine-dir=b", *names) == {"x": a, "y": b}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--engine-dir", "a", "b"), "--engine-dir a and 'b' were both given; use one of them"),
        (("a", ""), "ENGINE is empty; give a folder"),
        (("--models", "m.json", "a"), "--models names the engines; leave other engines and --model-name out"),
        ((), "no engine is given; pass its folder, or --models"),
        (("a", "b"), "2 engines, but 0 --model-name; give each engine a name"),
    ],
)
def test_engines_that_are_named_twice_or_never_are_refused(
    refused: Callable[..., str], arguments: tuple[str, ...], reason: str
) -> None:
    assert refused(*arguments, engine=False) == reason


def test_a_signal_that_comes_twice_at_once_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    now, heard = [0.0], []
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now[0]))
    interrupt = serve.once(0.2)
    for now[0] in (5.0, 5.1, 5.25, 6.0, 6.1):
        try:
            interrupt(signal.SIGINT, None)
        except KeyboardInterrupt:
            heard.append(now[0])
    assert heard == [5.0, 6.0]


def test_the_process_that_starts_a_server_does_without_torch(engine_dir: Path) -> None:
    """It takes seconds and 200 MB, and the engines have processes of their own."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKED, engine_dir], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr


def without(modules: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, modules, "serve", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_without_the_extra_help_is_no_traceback_and_serving_names_it(engine_dir: Path) -> None:
    modules = "aiohttp,tritonclient,grpc,pytriton"
    helped = without(modules, "--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "--openai-port" in helped.stdout
    ended = without(modules, "--engine-dir", engine_dir)
    lacks = f"error: tritonserver is not installed; {install('serve')} or pass --tritonserver PATH\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", lacks)


@pytest.mark.parametrize("module", ["aiohttp", "grpc", "tritonclient"])
def test_an_openai_port_without_its_modules_is_no_traceback(engine_dir: Path, module: str) -> None:
    free = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    ended = without(module, "--engine-dir", engine_dir, *free)
    lacks = f"error: --openai-port needs {module}, which is not installed; {install('serve')}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", lacks)


@pytest.mark.parametrize(
    "option", ["--openai-api-key=secret", "--openai-max-body=9", "--openai-max-requests=9"]
)
def test_an_openai_option_without_its_port_is_not_dropped_in_silence(
    refused: Callable[..., str], option: str
) -> None:
    name = option.partition("=")[0]
    assert (
        refused(option) == f"{name} is given, but no --openai-port: there is no OpenAI API; add --openai-port"
    )


def test_an_empty_openai_key_is_no_key(refused: Callable[..., str]) -> None:
    said = refused("--openai-port=0", "--openai-api-key=")
    assert said == "--openai-api-key is empty, callers would need none; give one, or leave it out"


def test_a_key_in_the_environment_is_for_the_openai_port_and_breaks_no_server_without(
    monkeypatch: pytest.MonkeyPatch, hemiola: Callable[..., Any]
) -> None:
    fronts = []
    monkeypatch.setattr(launcher, "Server", lambda *_, **__: None)
    monkeypatch.setattr(serve, "_serve", lambda server, front, restarts: fronts.append(front))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(KEY, "one two")
    for options in ([], ["--openai-port=0"], ["--openai-port=0", "--openai-api-key=three"]):
        assert hemiola("serve", "--engine-dir=a", *options) == (0, "", "")
    assert [front.api_keys for front in fronts] == [("one", "two"), ("one", "two"), ("three",)]
    assert [front.options.openai_port for front in fronts] == [None, 0, 0]
    monkeypatch.setenv("COLUMNS", "200")
    assert KEY in hemiola("serve", "--help").out


def test_a_secret_that_did_not_arrive_does_not_open_the_api_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, " ")
    plan = serve.FrontPlan(OpenaiOptions(openai_port=0), {}, 1)
    with pytest.raises(Refused, match=f"{KEY} is empty, callers would need no key; give one there, or unset"):
        _ = plan.api_keys


@pytest.mark.parametrize(
    ("option", "shown", "limit"),
    [
        ("--hang-timeout=0", "0.0", "at least 1"),
        ("--hang-timeout=nan", "nan", "a finite number"),
        ("--exit-timeout=-5", "-5", "at least 0"),
        ("--exit-timeout=9999999999", "9999999999", "at most 2147483647"),
        ("--start-timeout=-5", "-5.0", "more than 0"),
        ("--restart=-1", "-1", "at least 0"),
        ("--openai-max-body=-1", "-1", "at least 1"),
        ("--openai-max-requests=0", "0", "at least 1"),
        ("--http-port=99999", "99999", "at most 65535"),
        ("--metrics-port=-1", "-1", "at least 0"),
        ("--openai-port=65536", "65536", "at most 65535"),
        ("--grpc-port=80x", "'80x'", "a whole number"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_limit(
    refused: Callable[..., str], option: str, shown: str, limit: str
) -> None:
    said = refused(option)
    assert said.startswith(f"{option.partition('=')[0]} is {shown}; give {limit}"), said


@pytest.mark.parametrize("host", ["300.1.1.1", "203.0.113.7", "a..b", "é..x", "127.0.0.1:80"])
def test_a_host_that_is_not_here_is_not_its_ports_fault(refused: Callable[..., str], host: str) -> None:
    said = refused(f"--host={host}")
    assert said.startswith(f"nothing can listen on {host} (") and said.endswith(
        "); pass --host with an IPv4 address of this machine"
    )


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_not_every_interface(refused: Callable[..., str], host: str) -> None:
    said = refused(f"--host={host}")
    assert said == "--host is empty; pass --host with an IPv4 address of this machine"


@pytest.mark.parametrize("host", ["255.255.255.255", "224.0.0.1"])
def test_a_host_of_many_is_not_waited_for(refused: Callable[..., str], host: str) -> None:
    said = refused(f"--host={host}")
    assert (
        said
        == f"--host {host} is no address of one machine; pass --host with an IPv4 address of this machine"
    )


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "fe80::1%eth0", "::ffff:127.0.0.1"])
def test_an_ipv6_address_is_not_called_unknown(refused: Callable[..., str], host: str) -> None:
    assert refused(f"--host={host}") == (
        f"--host {host} is an IPv6 address, and hemiola listens on IPv4 only;"
        " pass --host with an IPv4 address of this machine"
    )


def test_a_models_file_that_is_not_there_is_not_called_broken(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    said = refused(f"--models={tmp_path}/none.json", engine=False)
    assert (
        said == f"--models {tmp_path}/none.json cannot be read (No such file or directory); pass another file"
    )


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (
            {"max_rowz": 8},
            "unknown setting 'max_rowz'; the settings are engine_dir, device, max_queue, min_p",
        ),
        ({"num_restarts": 8}, "unknown setting 'num_restarts'"),
        ({"heartbeat_file": "/tmp/x"}, "unknown setting 'heartbeat_file'"),
        ({"max_queue": -1}, "max_queue is -1; give at least 0"),
        ({"engine_dir": 5}, "engine_dir is 5; give a text"),
        ({"max_rows": 9999}, "max_rows is 9999, the engine was built for"),
        ({"device": 3}, "device is 3, but "),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_file_and_model(
    refused: Callable[..., str], tmp_path: Path, engine_dir: Path, own: dict, reason: str
) -> None:
    file = tmp_path / "models.json"
    file.write_text(
        json.dumps({"fine": {"engine_dir": str(engine_dir)}, "chat": {"engine_dir": str(engine_dir), **own}})
    )
    said = refused(f"--models={file}", engine=False)
    assert said.startswith(f"{file}: chat: {reason}") and "num_restarts," not in said, said


def test_a_models_file_without_models_starts_no_server(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text("{}")
    assert "models.json must be like" in refused(f"--models={tmp_path}/models.json", engine=False)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--max-rows=9999", "--max-rows is 9999, the engine was built for"),
        ("--max-len=99999999", "--max-len is 99999999, the engine was built for"),
        ("--max-rows=0", "--max-rows is 0; give at least 1"),
        ("--max-rows=many", "--max-rows is 'many'; "),
        ("--cuda-graphs=true", "--cuda-graphs is on, but the engine was built for cpu"),
        ("--memory-fraction=nan", "--memory-fraction is nan; "),
        ("--device=-1", "--device is -1; "),
        ("--device=3", "--device is 3, but "),
    ],
)
def test_what_the_engine_was_not_built_for_is_refused_before_a_server_starts(
    refused: Callable[..., str], option: str, reason: str
) -> None:
    assert refused(option).removeprefix("hemiola: ").startswith(reason)
