"""Imports point one way (plugins <- runtime <- builder), and pyproject.toml names every package on disk."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "plugins": {"plugins"},
    "runtime": {"plugins", "runtime"},
    "builder": {"plugins", "runtime", "builder"},
}


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, at import time?) for every import statement of a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", id(node) in top


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str) -> None:
    for path in _files(package):
        for module, _ in _imports(path):
            parts = module.split(".")
            assert parts[0] not in {*MAY_IMPORT, "tests", "scripts"}, (
                f"{path}: bare `import {module}` loads a second copy"
            )
            if parts[0] == "hemiola" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in MAY_IMPORT[package], f"{path} imports {module}: upwards"


def test_runtime_and_plugins_import_without_compilers_and_transformers() -> None:
    code = """
import sys
banned = ("transformers", "onnx", "tensorrt", "triton")
class Ban:
    def find_spec(self, name, path=None, target=None):
        # torch probes for triton inside a try block: pretend that it is absent
        if name.split(".")[0] in banned:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Ban())
import hemiola.plugins, hemiola.runtime.llm, hemiola.runtime.cli
assert not set(banned) & {name.split(".")[0] for name in sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})


def test_pyproject_names_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {"hemiola"}
    for package in MAY_IMPORT:
        for folder in [ROOT / package, *sorted((ROOT / package).rglob("*"))]:
            if folder.is_dir() and any(folder.glob("*.py")):
                on_disk.add(".".join(["hemiola", *folder.relative_to(ROOT).parts]))
    assert {name for name in config["packages"] if not name.startswith("hemiola.model_repo")} == on_disk
