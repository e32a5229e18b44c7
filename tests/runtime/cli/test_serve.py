"""`hemiola serve` as a command; tests/model_repo has the real one."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from hemiola.runtime.cli import serve
from hemiola.runtime.cli.options import spelled
from hemiola.runtime.config import ServeConfig


def test_every_option_of_an_engine_is_an_option_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(serve, "Server", lambda engines, **settings: made.append((engines, settings)))
    monkeypatch.setattr(serve, "_serve", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command = typer.Typer()
    command.command()(serve.serve)
    given = {name: spelled(field.default) for name, field in ServeConfig.model_fields.items()}
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    command(args=["--engine-dir", "a", *arguments, "--max-rows", "4"], standalone_mode=False)
    ((engines, settings),) = made
    assert engines == {"hemiola": Path("a")}
    assert ServeConfig(**settings["options"]) == ServeConfig(max_rows=4)
    command(args=["--engine-dir", "a"], standalone_mode=False)
    assert made[1][1]["options"] == {}


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
