"""Hemiola as it is installed: a wheel made from a source archive, an editable install of a clone, a checkout
that is not installed, each from several folders.

The client without the engine: tests/runtime/serving/test_client_alone.py.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import setuptools

import hemiola

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("builder", "model_repo", "plugins", "runtime")
SOURCES = ("hemiola", *ROOMS, "pyproject.toml", "README.md", "LICENSE")
UNWANTED = shutil.ignore_patterns("__pycache__", "*.egg-info")
LOOK = """
import json, sys, hemiola, hemiola.builder.options, hemiola.runtime.errors
from importlib.util import find_spec
from hemiola import Refused, SamplingParams
if sys.argv[1:]:
    from hemiola import LLM
print(json.dumps([hemiola.__file__, hemiola.runtime.errors.__file__, find_spec("hemiola.plugins").origin]))
"""
KERNELS = """
from hemiola.plugins.cpu import jit, rows
print(jit.__file__, [kernel.compile().cache_hits for kernel in jit.KERNELS if kernel.name == "_check"])
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `git clone` makes: a folder named hemiola, which Python could take for the package."""
    folder = tmp_path_factory.mktemp("parent") / "hemiola"
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=UNWANTED)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By way of the source archive, in which links are what they lead to."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"
    python(build.format("sdist"), folder, cwd=clone)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        assert not [member.name for member in packed if member.issym() or member.islnk()]
        packed.extractall(folder, filter="data")
    python(build.format("wheel"), folder, cwd=folder / archive.name.removesuffix(".tar.gz"))
    (made,) = folder.glob("*.whl")
    return made


def python(code: str, *arguments: object, cwd: Path, executable: Path | str = sys.executable) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment_with(folder: Path, *what: object) -> Path:
    """The interpreter of a fresh environment that has hemiola from there, and all else from here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = {str(Path(module.__file__ or "").parents[1]) for module in (numpy, setuptools)}
    (site / "from_here.pth").write_text(
        "\n".join(sorted(here)) + "\n"
    )  # hooks of an install there do not run
    pip = "import runpy, sys; sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')"
    quiet = ("-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")
    kept = ("--no-build-isolation", "--ignore-installed")
    made = folder / "bin" / "python"
    python(pip, "install", *quiet, *kept, *what, cwd=folder, executable=made)
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(tmp_path_factory.mktemp("editable") / "venv", "-e", clone)


def test_a_wheel_has_every_module_and_every_file_of_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    wanted = {f"hemiola/{path.name}" for path in (ROOT / "hemiola").glob("*.*")}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.*"):
            if file.is_file() and "__pycache__" not in file.parts:
                wanted.add(f"hemiola/{file.relative_to(ROOT)}")
    assert names == wanted and "hemiola/py.typed" in names


def test_a_wheel_is_imported_from_everywhere(installed: Path, clone: Path) -> None:
    for cwd in (Path("/"), clone.parent):
        files = json.loads(python(LOOK, cwd=cwd, executable=installed))
        assert all(Path(file).is_relative_to(installed.parents[1]) for file in files)


def test_an_editable_install_is_imported_from_the_clones_parent(editable: Path, clone: Path) -> None:
    """There the clone's folder, which is named hemiola, won as a namespace package."""
    for cwd, llm in ((clone.parent, ["llm"]), (Path("/"), []), (clone, []), (clone / "hemiola", [])):
        files = json.loads(python(LOOK, *llm, cwd=cwd, executable=editable))
        assert all(Path(file).is_relative_to(clone / "hemiola") for file in files), cwd


def test_commands_are_installed(installed: Path, editable: Path, tmp_path: Path) -> None:
    for made in (installed, editable):
        for command in ("hemiola", "build-engine"):
            done = subprocess.run([made.parent / command, "--version"], cwd=tmp_path, capture_output=True)
            assert done.stdout.decode() == f"hemiola {hemiola.__version__}\n", done.stderr


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies of what links lead to"])
def test_a_checkout_that_is_not_installed_is_imported(clone: Path, tmp_path: Path, links: bool) -> None:
    """Some tools copy links as folders."""
    copy = tmp_path / "hemiola"
    shutil.copytree(clone, copy, symlinks=links, ignore=UNWANTED)
    here = f"import sys; sys.path[:0] = [{str(Path(numpy.__file__).parents[1])!r}, {str(copy)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", here + LOOK], cwd="/", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(copy / "hemiola") for file in json.loads(done.stdout))


def test_a_second_start_from_another_folder_compiles_no_kernel(installed: Path, tmp_path: Path) -> None:
    """`hemiola serve` imports the package through a new folder at each start, and compiled all of them."""
    (package,) = installed.parents[1].glob("lib/python*/site-packages/hemiola")
    said = []
    for start in ("one", "two"):
        (tmp_path / start).mkdir()
        (tmp_path / start / "hemiola").symlink_to(package)
        before = f"import os; os.environ['XDG_CACHE_HOME'] = {str(tmp_path / 'cache')!r}\n"
        said.append(python(before + KERNELS, cwd=tmp_path / start, executable=installed).split())
    assert all(Path(path).is_relative_to(tmp_path) for path, _ in said)
    assert [hits for _, hits in said] == ["[0]", "[1]"]


OPEN = """
import sys
from hemiola import LLM
import hemiola
said = []
LLM(sys.argv[1], progress=lambda *report: said.append(report)).close()
print(hemiola.__file__, [report for report in said if report[0] == "compiling kernels"])
"""


def test_a_second_start_of_a_wheel_compiles_no_kernel_of_an_engine(
    installed: Path, tmp_path: Path, tiny_engine: Callable[..., Path]
) -> None:
    """The first may find those of this checkout, which has the same sources."""
    (package,) = installed.parents[1].glob("lib/python*/site-packages/hemiola")
    said = []
    for start in ("one", "two"):
        (tmp_path / start).mkdir()
        (tmp_path / start / "hemiola").symlink_to(package)  # as a server does
        engine = tiny_engine("qwen3_5")
        said.append(python(OPEN, engine, cwd=tmp_path / start, executable=installed).split(maxsplit=1))
    assert all(Path(path).is_relative_to(tmp_path) for path, _ in said)
    assert said[1][1] == "[]\n"


def test_dir_shows_what_there_is() -> None:
    assert set(hemiola.__all__) == set(hemiola._HOMES) <= set(dir(hemiola))
    for name in hemiola.__all__:
        assert getattr(hemiola, name).__name__ == name


def test_type_checkers_see_what_is_imported_late() -> None:
    text = (ROOT / "hemiola" / "__init__.py").read_text()
    block = text[text.index("if TYPE_CHECKING:") : text.index("__version__")]
    assert sorted(name for name in hemiola.__all__ if f" {name}" not in block.replace(",", "")) == []
    assert (ROOT / "hemiola" / "py.typed").is_file()
