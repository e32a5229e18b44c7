"""Folders of builds in a folder that others write to, too."""

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest

from hemiola.builder import place
from hemiola.runtime.engine_files import strays
from hemiola.runtime.errors import Refused


def build(engine_dir: Path) -> None:
    with place.fresh(engine_dir) as folder:
        (folder / "manifest.json").write_text("{}")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path / "engine"


def test_files_that_came_while_an_engine_was_built_are_removed(engine: Path) -> None:
    said = (
        f"built, but .* has files but no engine in it; make room there and move {engine}.built-1 to {engine}"
    )
    with pytest.raises(Refused, match=said), place.fresh(engine) as folder:
        (folder / "manifest.json").write_text("{}")
        engine.mkdir()
        (engine / "thesis.txt").write_text("mine")
    assert (engine / "thesis.txt").read_text() == "mine"


def test_a_finished_engine_whose_place_was_taken_meanwhile_is_thrown_away(engine: Path) -> None:
    for number in (1, 2):
        with pytest.raises(Refused, match=f"built-{number}"), place.fresh(engine) as folder:
            (folder / "manifest.json").write_text(str(number))
            engine.mkdir(exist_ok=True)
            (engine / "thesis.txt").write_text("mine")
    names = sorted(path.name for path in engine.parent.iterdir())
    assert names == ["engine", "engine.built-1", "engine.built-2"]
    assert [(engine.parent / name / "manifest.json").read_text() for name in names[1:]] == ["1", "2"]


def test_builds_that_lose_their_place_at_once_want_one_name_and_an_engine_is_thrown_away(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, other = Path.rename, engine.with_name("engine.built-1")

    def late(self: Path, target: Path) -> Path:
        if target == other:  # another build's comes at this moment
            other.mkdir()
            (other / "manifest.json").write_text("{}")
        return rename(self, target)

    with pytest.raises(Refused, match="built-2"), place.fresh(engine) as folder:
        (folder / "manifest.json").write_text("mine")
        engine.write_text("a file")
        monkeypatch.setattr(Path, "rename", late)
    assert (other / "manifest.json").read_text() == "{}"
    assert (engine.parent / "engine.built-2/manifest.json").read_text() == "mine"


def test_a_finished_engine_that_cannot_be_moved_is_thrown_away(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the one that it was to replace."""
    build(engine)
    monkeypatch.setattr(place, "exchanged", lambda *_: False)
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if target == engine and self.name == place.NEW:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(self, target)

    with (
        pytest.raises(Refused, match=r"engine cannot be replaced \(Device or resource busy\); .*built-1 to "),
        place.fresh(engine) as folder,
    ):
        (folder / "manifest.json").write_text("new")
        monkeypatch.setattr(Path, "rename", refused)
    assert (engine / "manifest.json").read_text() == "{}"
    assert (engine.parent / "engine.built-1/manifest.json").read_text() == "new"


def test_a_mount_point_is_refused_when_the_engine_is_built(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == engine)
    with pytest.raises(
        Refused, match=f"is a mount point, .*; choose a directory in it, such as {engine}/engine"
    ):
        place.refuse_occupied(engine)


def test_files_that_came_into_an_engine_while_the_next_was_built_are_removed(engine: Path) -> None:
    build(engine)
    with pytest.raises(Refused, match=r"beside it thesis\.txt"), place.fresh(engine):
        (engine / "thesis.txt").write_text("mine")
    assert (engine / "thesis.txt").read_text() == "mine" and (engine / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "socket"])
def test_what_is_no_file_beside_an_engine_is_removed(engine: Path, kind: str) -> None:
    build(engine)
    stray = engine / "stray"
    if kind == "link":
        stray.symlink_to("/nowhere")
    else:
        os.mknod(stray, 0o600 | (0o010000 if kind == "pipe" else 0o140000))
    with pytest.raises(Refused, match="beside it stray"):
        place.refuse_occupied(engine)


@pytest.mark.parametrize(("depth", "name"), [(1100, "a"), (25, "n" * 200)], ids=["many", "long"])
def test_folders_deep_in_each_other_are_a_traceback(engine: Path, depth: int, name: str) -> None:
    """And one that comes while an engine is built loses it."""
    build(engine)
    above = os.open(engine, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=above)
        above, before = os.open(name, os.O_RDONLY, dir_fd=above), above
        os.close(before)
    os.close(os.open("thesis.txt", os.O_CREAT, dir_fd=above))
    os.close(above)
    try:
        assert len(strays(engine, ["manifest.json"])) == 1
        with pytest.raises(Refused, match=rf"beside it {name}/.*\.\.\., which a new engine would remove"):
            build(engine)
        assert (engine.with_name("engine.built-1") / "manifest.json").exists()
    finally:
        subprocess.run(["rm", "-rf", engine / name], check=True)  # shutil.rmtree, and so pytest, calls itself


def test_a_link_in_a_circle_is_a_traceback(engine: Path) -> None:
    engine.symlink_to(engine.name)
    with pytest.raises(Refused, match="engine cannot be written"):
        build(engine)


def test_who_looks_while_an_engine_is_replaced_finds_none(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would one be there if the build were killed then."""
    one, other = engine.with_name("one"), engine.with_name("other")
    one.mkdir()
    other.mkdir()
    if not place.exchanged(one, other):
        pytest.skip("the system here exchanges no folders")
    build(engine)
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("the place is empty for a moment"))
    with place.fresh(engine) as folder:
        (folder / "manifest.json").write_text("[]")
    assert (engine / "manifest.json").read_text() == "[]"
    assert sorted(path.name for path in engine.parent.iterdir()) == ["engine", "one", "other"]


def test_a_link_named_like_an_abandoned_build_gives_away_what_it_leads_to(engine: Path) -> None:
    (engine.parent / "own/old").mkdir(parents=True)
    (engine.parent / ".engine.building-abcdefgh").symlink_to("own")
    with pytest.raises(KeyboardInterrupt), place.fresh(engine):
        raise KeyboardInterrupt
    assert (engine.parent / "own/old").exists() and not engine.exists()


def test_a_folder_named_like_an_abandoned_build_is_removed(engine: Path) -> None:
    notes = engine.parent / ".engine.building-notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("mine")
    build(engine)
    assert (notes / "thesis.txt").read_text() == "mine"


def test_another_users_folder_is_taken_for_an_abandoned_build(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine would become ours where a build is broken off."""
    theirs = engine.parent / ".engine.building-abcdefgh"
    (theirs / "old").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    with pytest.raises(KeyboardInterrupt), place.fresh(engine):
        raise KeyboardInterrupt
    assert (theirs / "old").exists() and not engine.exists()


def test_a_pipe_named_like_an_abandoned_build_stops_every_build(engine: Path) -> None:
    pipe = engine.parent / ".engine.building-abcdefgh"
    os.mkfifo(pipe)
    building = threading.Thread(target=build, args=(engine,), daemon=True)
    building.start()
    building.join(60)
    if waits := building.is_alive():
        os.close(os.open(pipe, os.O_RDWR))
    assert not waits and (engine / "manifest.json").exists()


def test_two_builds_at_once_leave_one_whole_engine(engine: Path) -> None:
    with place.fresh(engine) as one, place.fresh(engine) as other:
        for folder, text in ((one, "{}"), (other, "[]")):
            (folder / "manifest.json").write_text(text)
    assert (engine / "manifest.json").read_text() == "{}"
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]
