"""The digest of --same-bits reads all of a checkpoint: it says how far it is, and finds what was changed."""

import os
from pathlib import Path

import pytest

from hemiola.builder import hashes
from hemiola.builder.options import Options
from hemiola.builder.same_bits import write_same_bits
from hemiola.runtime.errors import Refused
from hemiola.runtime.progress import HASHING_CHECKPOINT, Report, amount
from hemiola.runtime.same_bits import FILE


def written(folder: Path, report: Report) -> str:
    engine = folder / "engine"
    engine.mkdir(exist_ok=True)
    write_same_bits(engine, folder, Options(same_bits=True), 1, report)
    return (engine / FILE).read_text()


def test_a_checkpoint_that_is_hashed_for_the_same_bits_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "PART", 4)
    (tmp_path / "config.json").write_text("123456")
    (tmp_path / "model.safetensors").write_text("12")
    (tmp_path / "README.md").write_text("123456789")
    reports: list[tuple[str, int, int]] = []
    first = written(tmp_path, lambda *report: reports.append(report))
    assert reports == [(HASHING_CHECKPOINT, done, 8) for done in (4, 6, 8)]
    assert amount(*reports[-1]) == "8 B of 8 B"
    (tmp_path / "model.safetensors").write_text("13")
    assert written(tmp_path, lambda *_: None) != first


def test_a_stray_file_of_a_checkpoint_is_read_for_the_same_bits(tmp_path: Path) -> None:
    """A pipe had no end, a link led to any file, and an adapter beside them made other engines of the same
    weights."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("12")
    alone = written(tmp_path, lambda *_: None)
    (tmp_path / "adapter_model.safetensors").write_text("13")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert written(tmp_path, lambda *_: None) == alone
    (tmp_path / "model.safetensors").rename(tmp_path / "weights")
    (tmp_path / "model.safetensors").symlink_to("weights")
    with pytest.raises(Refused, match=r"model.safetensors is a link to weights"):
        written(tmp_path, lambda *_: None)
