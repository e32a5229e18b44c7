"""What is said where an extra is missing: the command works; test_client_alone.py asks a machine without."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import hemiola
from hemiola.runtime.extra import ENGINE, SERVE, install, lacking, or_exit

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = re.compile(r"pip install (?:-\S+ )*['\"]?hemiola(?:\[\w+\])?['\"]?(?: |$|\\n)")


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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a wheel: no checkout is around the package."""
    monkeypatch.setattr(hemiola, "__file__", str(tmp_path / "site-packages/hemiola/__init__.py"))


def origin(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))


def test_a_checkout_is_installed_from_itself() -> None:
    assert install("cuda") == f"pip install -e '{ROOT}[cuda]'"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('{"url": "file:///a/x.whl"}', "pip install 'hemiola[cuda] @ file:///a/x.whl'"),
        (
            '{"url": "https://a/b.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}',
            "pip install 'hemiola[cuda] @ git+https://a/b.git@12ab'",
        ),
        (None, "install hemiola[cuda] from where hemiola came"),
    ],
)
def test_a_wheel_is_installed_from_where_it_came(
    installed: None, monkeypatch: pytest.MonkeyPatch, text: str | None, command: str
) -> None:
    origin(monkeypatch, text)
    assert install("cuda") == command


def test_a_package_without_metadata_names_no_index(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert install("cuda") == "install hemiola[cuda] from where hemiola came"


def test_no_message_installs_hemiola_from_an_index_where_it_is_not_ours() -> None:
    assert NOT_OURS.search("pip install hemiola") and NOT_OURS.search("pip install 'hemiola[cuda]'\\n")
    for folder in ("hemiola", "builder", "plugins", "runtime", "model_repo", "scripts", "demo", "docs"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".md", ".pbtxt", ".sh"} or file.name == "Dockerfile":
                assert not NOT_OURS.search(file.read_text()), file
