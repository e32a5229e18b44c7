"""Imports point one way: plugins <- runtime <- builder, and from upper rooms of runtime to lower ones."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "plugins": {"plugins"},
    "runtime": {"plugins", "runtime"},
    "builder": {"plugins", "runtime", "builder"},
}
# Rooms of runtime/, and which others each may import. Its other files are the ground floor.
GROUND = "ground"
ROOMS = {
    GROUND: set(),
    "cache": {GROUND},
    "device": {GROUND},
    "choose": {GROUND, "device"},
    "schedule": {GROUND, "cache", "device", "choose"},
    "step": {GROUND, "cache", "device", "choose", "schedule"},
    "open": {GROUND, "cache", "device", "choose", "schedule", "step"},
    "llm": {GROUND, "cache", "device", "choose", "schedule", "open"},
    "serving": {GROUND},
    "bench": {GROUND, "llm"},
    "dynamo": {GROUND, "cache", "llm", "serving"},
    "cli": {GROUND, "llm", "serving", "bench", "dynamo"},
    "__main__": {GROUND, "cli"},
}
# Rooms of builder/, from the checkpoint to the engine; each imports those before it. A name is a file or a
# folder.
BUILDER = {
    "checkpoint": {
        "checkpoint", "cut", "formats", "hashes", "hub", "lazy", "options", "place", "random_weights",
        "same_bits", "shard", "token_ids", "weights",
    },
    "models": {"models"},
    "graph": {"graph", "onnx", "dequantise"},
    "passes": {"passes"},
    "targets": {"targets"},
    "trt": {"targets.trt"},  # what only TensorRT and TensorRT-RTX need; the targets import it by name
    "build": {"build", "cli", "refuse", "tokenizer", "__main__"},
}  # fmt: skip
# What is the same thing on a CPU and on a GPU, or in several ops, may have one name.
SHARED_NAMES = {"Kernel", "TilePlan", "Call", "Size", "Trunk"}


def _imports(path: Path) -> Iterator[str]:
    """The module of every import statement of a file, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if _is_module(name) else node.module for name in names)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return name.startswith("hemiola.") and (path.is_dir() or path.with_suffix(".py").is_file())


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["hemiola", *parts]).removesuffix(".__init__")


def _room(module: str) -> str:
    name = [*module.split("."), ""][2]
    return name if name in ROOMS or (name and (ROOT / "runtime" / name).is_dir()) else GROUND


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str) -> None:
    for path in _files(package):
        for module in _imports(path):
            parts = module.split(".")
            assert parts[0] not in {*MAY_IMPORT, "tests", "scripts"}, (
                f"{path}: bare `import {module}` loads a second copy"
            )
            if parts[0] == "hemiola" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                assert parts[1] in MAY_IMPORT[package], f"{path} imports {module}: upwards"


def test_rooms_import_lower_rooms_only() -> None:
    for path in _files("runtime"):
        own = _room(_module(path))
        for module in _imports(path):
            if module.startswith("hemiola.runtime."):
                assert _room(module) in ROOMS[own] | {own}, f"{path} imports {module}: {own} may not"


def test_no_arrow_of_the_picture_points_up() -> None:
    """docs/architecture.md says so, of the rooms of plugins/, too."""
    code = "from scripts.architecture import upward; print(*upward(), sep='\\n')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert made.stdout.strip() == ""


def _builder_room(module: str) -> int:
    """Its place among the rooms of builder/."""
    name = module.removeprefix("hemiola.builder.")
    inside = {place: names for place, names in enumerate(BUILDER.values()) if _is_in(name, names)}
    assert inside, f"{module} stands in no room of builder/: name it in BUILDER"
    return max(inside)


def _is_in(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_rooms_of_the_builder_import_earlier_rooms_only() -> None:
    for path in _files("builder"):
        if _module(path) == "hemiola.builder":
            continue
        for module in _imports(path):
            if module.startswith("hemiola.builder."):
                assert _builder_room(module) <= _builder_room(_module(path)), f"{path} imports {module}"


def test_only_the_fence_of_tensorrt_imports_tensorrt() -> None:
    """And what runs its engines."""
    inside = ("builder/targets/trt/", "runtime/device/segments/tensorrt")
    for package in MAY_IMPORT:
        for path in _files(package):
            if not str(path.relative_to(ROOT)).startswith(inside):
                for module in _imports(path):
                    assert not module.startswith(("tensorrt", "hemiola.builder.targets.trt")), path


@pytest.mark.parametrize("package", ["runtime", "builder"])
def test_no_modules_import_each_other(package: str) -> None:
    graph = {_module(path): set(_imports(path)) for path in _files(package)}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them


def test_the_client_comes_without_torch_and_the_engine() -> None:
    code = """
import sys
from hemiola import AsyncClient, Client, Failed, Lost, Refused, SamplingParams
heavy = ("torch", "numba", "safetensors", "tokenizers", "hemiola.plugins", "hemiola.runtime.schedule")
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})


def test_runtime_and_plugins_import_without_compilers_and_transformers() -> None:
    code = """
import sys
banned = ("transformers", "onnx", "tensorrt", "triton", "numba")
class Ban:
    def find_spec(self, name, path=None, target=None):
        # torch probes for triton inside a try block: pretend that it is absent
        if name.split(".")[0] in banned:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Ban())
import hemiola.plugins, hemiola.runtime.llm, hemiola.runtime.cli.main
for op in hemiola.plugins.OPS.values():
    if op.runs_on("cuda"):
        op.module("cuda")
assert not set(banned) & {name.split(".")[0] for name in sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})


def test_a_module_of_the_builder_can_be_imported_first() -> None:
    """formats/ imports its files by name, which the graph of imports does not show. Each in a fork of a
    process that has torch alone, which takes seconds."""
    code = """
import os, sys, torch
for name in ("lazy", "formats", "formats.rounded", "targets.torch"):
    assert not [known for known in sys.modules if known.startswith("hemiola")]
    if not (child := os.fork()):
        __import__(f"hemiola.builder.{name}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})


def test_every_folder_with_modules_is_a_package() -> None:
    """Others would be in no wheel."""
    for package in MAY_IMPORT:
        assert (ROOT / "hemiola" / package).samefile(ROOT / package)
        for file in _files(package):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} lacks __init__.py"


def test_a_class_name_occurs_once() -> None:
    homes: dict[str, list[str]] = {}
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name for name, found in homes.items() if len(found) > 1} == SHARED_NAMES, homes


def test_a_process_that_we_start_imports_from_the_folder_that_a_user_is_in() -> None:
    """Python puts it first, before its own library, unless -P or -I forbids it: it may be a stranger's."""
    found = []
    for path in (path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.List(elts=[ast.Attribute(attr="executable"), ast.Constant(value=first), *_])
                    | ast.Tuple(elts=[ast.Attribute(attr="executable"), ast.Constant(value=first), *_])
                ):
                    assert first in ("-P", "-I"), f"{path}:{node.lineno} starts Python with {first}"
                    found.append(path.name)
    assert {"followers.py", "bench.py", "launcher.py", "trial.py", "network.py"} <= set(found)
