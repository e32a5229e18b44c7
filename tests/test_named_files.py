"""Files that a document names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"(?<![\w./<>-])[\w<>][\w/<>.-]*\.(?:py|md|toml|patch)\b")
FOLDERS = ("builder", "plugins", "runtime", "model_repo", "tests", "demo", "scripts", "benchmarks", "docs")
WRITTEN = {"summary.md", "tables.md", "benchmarks/gpu_session.md"}  # by a session on a GPU


def is_there(name: str) -> bool:
    """From the root, or from the folder of which a passage speaks; <op> stands for any."""
    pattern = re.sub(r"<\w+>", "*", name)
    return any(ROOT.glob(pattern)) or any(any((ROOT / folder).rglob(pattern)) for folder in FOLDERS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    names = sorted(set(FILE.findall(re.sub(r"https?://\S+", "", document.read_text()))))
    assert [name for name in names if not is_there(name) and name not in WRITTEN] == []
