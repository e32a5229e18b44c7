"""What is said where the extra `engine` is missing; test_client_alone.py asks it of a machine without."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hemiola.runtime.extra import ENGINE, SERVE, lacking, or_exit

ROOT = Path(__file__).resolve().parents[2]


def test_what_pyproject_calls_engine_is_what_is_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {Requirement(line).name for line in extras["engine"]} == ENGINE


def test_what_is_called_serve_comes_with_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [Requirement(line) for line in extras["serve"] + extras["client"]]
    brought = {name for one in wanted for name in {one.name, *one.extras}}
    assert brought >= SERVE and "client" in brought


def test_a_module_of_no_extra_is_missing_as_ever() -> None:
    error = ModuleNotFoundError("No module named 'this'", name="this")
    with pytest.raises(ModuleNotFoundError) as raised:
        lacking("hemiola", error)
    assert raised.value is error


def test_an_interrupt_of_imports_is_no_traceback(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, or_exit("hemiola"):
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
