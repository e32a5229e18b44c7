"""Builds the wheel of hemiola-client: the files of this tree that hemiola.Client needs, without the engine.

pip has no way to leave dependencies out, so a machine without torch needs a distribution of its own. Its
files are those of hemiola: install one or the other.
"""

import ast
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = ("runtime/serving/client.py", "runtime/serving/aclient.py")
NEEDS = ("numpy", "pydantic", "tritonclient")  # what those import
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "hemiola-client"
version = "{version}"
description = "hemiola.Client and AsyncClient, for machines that run no engines."
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = {dependencies}

[tool.setuptools]
packages = {packages}
"""


def files() -> set[Path]:
    """The modules that the client imports, from ENTRIES on, and the packages around them."""
    found: set[Path] = set()
    left = [Path(name) for name in ENTRIES]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        found |= {folder / "__init__.py" for folder in path.parents[:-1]}
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hemiola."):
                own = Path(*str(node.module).split(".")[1:])
                names = [own, *(own / alias.name for alias in node.names)]
                left += [
                    name.with_suffix(".py") for name in names if (ROOT / name).with_suffix(".py").is_file()
                ]
    return found


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["client"]
    return [one for one in listed if one.startswith(NEEDS)]


def version() -> str:
    source = (ROOT / "hemiola/__init__.py").read_text()
    return source.partition('__version__ = "')[2].partition('"')[0]


def lay_out(folder: Path) -> None:
    """A source tree of its own."""
    for path in [Path("hemiola/__init__.py"), *files()]:
        target = folder / "hemiola" / path.relative_to("hemiola" if path.parts[0] == "hemiola" else ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    packages = sorted(".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("__init__.py"))
    text = PROJECT.format(version=version(), dependencies=dependencies(), packages=packages)
    (folder / "pyproject.toml").write_text(text)


def main(out: Path, *pip_options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            str(out),
            *pip_options,
            folder,
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist"), *sys.argv[2:])
