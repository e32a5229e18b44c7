"""`pip install '.[client]'` where nothing else is: the clients work, and the rest says what it lacks."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from kit.fake_triton import Triton, final
from packaging.requirements import Requirement

from hemiola.runtime.extra import ENGINE

Bare = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("hemiola", "plugins", "runtime", "builder", "model_repo", "pyproject.toml", "README.md", "LICENSE")
CODE = """
import asyncio, sys
from hemiola import AsyncClient, Busy, Client, Failed, Lost, Refused, SamplingParams
url, *heavy = sys.argv[1:]
with Client(url) as client:
    assert client.generate(["a"], SamplingParams(max_tokens=3))[0].text == "said"
async def run():
    async with AsyncClient(url) as client:
        assert (await client.chat([{"role": "user", "content": "a"}])).text == "said"
asyncio.run(run())
for name in heavy:
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} can be imported")
print("works alone")
"""
LACKS = r"{} needs {}, which is not installed; pip install 'hemiola\[engine\] @ file://.*/source'"


def needed(requirement: str) -> set[str]:
    """Distributions that pip would install for it, as they are here."""
    parsed = Requirement(requirement)
    found = {parsed.name}
    for line in metadata.requires(parsed.name) or []:
        below = Requirement(line)
        wanted = [{"extra": extra} for extra in {*parsed.extras, ""}]
        if below.marker is None or any(below.marker.evaluate(one) for one in wanted):
            bare = f"{below.name}[{','.join(below.extras)}]" if below.extras else below.name
            found |= needed(bare) if below.name not in found else set()
    return found


def make_wheel(name: str, folder: Path) -> None:
    """An installed distribution as the wheel that it came from, but for scripts: no network is needed."""
    distribution = metadata.distribution(name)
    tag = (distribution.read_text("WHEEL") or "").partition("Tag: ")[2].split()[0]
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        for file in distribution.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(Path(file.locate()), file)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Runs a program of a fresh environment. Its pip found what a client may need and what builds hemiola."""
    folder = tmp_path_factory.mktemp("bare")
    wheels, source = folder / "wheels", folder / "source"
    wheels.mkdir()
    for name in set().union(*map(needed, ("numpy", "pydantic", "tritonclient[grpc]", "setuptools"))):
        make_wheel(name, wheels)
    source.mkdir()  # setuptools would leave its own folders in the checkout
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", folder / "venv/bin/python", "install"]
    offline = ["-q", "--disable-pip-version-check", "--no-compile", "--no-index", "--find-links", wheels]
    subprocess.run([*pip, *offline, ".[client]"], cwd=source, check=True)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "venv/bin" / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={})

    return run


def test_the_clients_need_no_engine(bare: Bare, triton: Triton, url: str) -> None:
    triton.answers = [final(text_output="said", output_ids=[1], input_ids=[2])]
    ran = bare("python", "-c", CODE, url, *ENGINE)
    assert ran.stdout == "works alone\n", ran.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("hemiola --help", "hemiola"),
        ("python -m hemiola generate", "hemiola"),
        ("python -m hemiola.runtime", "hemiola"),
        ("build-engine --help", "build-engine"),
        ("python -m hemiola.builder", "build-engine"),
    ],
)
def test_a_command_without_the_engine_says_so_in_one_line(bare: Bare, command: str, name: str) -> None:
    ran = bare(*command.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(f"error: {LACKS.format(name, 'typer')}\n", ran.stderr)


def test_llm_without_the_engine_says_so(bare: Bare) -> None:
    ran = bare("python", "-c", "from hemiola import LLM")
    assert re.fullmatch("ImportError: " + LACKS.format("hemiola.LLM", "torch"), ran.stderr.splitlines()[-1])
