"""Files that a document names are there, and scripts have the options that it shows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"(?<![\w./<>-])[\w<>][\w/<>.-]*\.(?:py|md|toml|patch)\b")
FOLDERS = ("builder", "plugins", "runtime", "model_repo", "tests", "demo", "scripts", "benchmarks", "docs")
WRITTEN = {"summary.md", "tables.md", "benchmarks/gpu_session.md"}  # by a session on a GPU
RESULTS = sorted((ROOT / "benchmarks").glob("*.md"))
SCRIPT = re.compile(r"\b((?:benchmarks|scripts)/\w+\.py)((?: +[^\s`|;)]+)*)")
OPTION = re.compile(r"--([a-z][\w-]*)")


def is_there(name: str) -> bool:
    """From the root, or from the folder of which a passage speaks; <op> stands for any."""
    pattern = re.sub(r"<\w+>", "*", name)
    return any(ROOT.glob(pattern)) or any(any((ROOT / folder).rglob(pattern)) for folder in FOLDERS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    names = sorted(set(FILE.findall(re.sub(r"https?://\S+", "", document.read_text()))))
    assert [name for name in names if not is_there(name) and name not in WRITTEN] == []


def takes(script: str, option: str) -> bool:
    """By argparse, or as an argument of a function that typer calls."""
    source, argument = (ROOT / script).read_text(), option.replace("-", "_")
    return f'"--{option}"' in source or re.search(rf"^    {argument}: ", source, re.M) is not None


@pytest.mark.parametrize("document", DOCUMENTS + RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_that_are_shown_exist(document: Path) -> None:
    text = document.read_text().replace("\n--", " --")  # a line may end within a command
    shown = {(script, option) for script, given in SCRIPT.findall(text) for option in OPTION.findall(given)}
    assert [call for call in sorted(shown) if not takes(*call)] == []
