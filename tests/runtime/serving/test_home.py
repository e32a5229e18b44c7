"""Folders of servers: one's own is safe, those of the dead go."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving import home as homes
from hemiola.runtime.serving.home import Home, remove_stale

HOLD = """
import os, pathlib
from hemiola.runtime.serving import home
home.SHARED_MEMORY = pathlib.Path(os.environ["SHARED_MEMORY"])
print(home.Home().path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody else's folders."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SHARED_MEMORY", str(tmp_path / "shm"))
    monkeypatch.setattr(homes, "SHARED_MEMORY", tmp_path / "shm")
    yield


def test_a_home_goes_with_all_it_has(tmp_path: Path) -> None:
    home = Home()
    (home.path / "models").mkdir()
    (tmp_path / f"shm/{home.shm_prefix}region").touch()
    assert home.beats.is_dir()
    home.remove()
    assert os.listdir(tmp_path) == ["shm"] and not os.listdir(tmp_path / "shm")


def test_every_start_left_a_folder_of_the_python_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays as long as another server runs, whose it may be; what others made stays, too."""
    monkeypatch.setattr(homes, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(homes, "SERVER", f"server{os.getpid()}")
    older, ours, full, link, later = (
        tmp_path / f"python_env_{name}" for name in ("older", "ours", "full", "link", "later")
    )
    older.mkdir()
    home = Home()
    ours.mkdir()
    (full / "0").mkdir(parents=True)
    link.symlink_to(older)
    home.environments.note()
    later.mkdir()
    rename = f"echo {homes.SERVER} > /proc/self/comm; echo renamed; read line"
    with subprocess.Popen(["sh", "-c", rename], stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout.readline() == "renamed\n"
        home.environments.remove()
        assert ours.is_dir()
        server.communicate("end\n")
    home.remove()
    assert not ours.exists() and all(path.exists() for path in (older, full, link, later))


@pytest.mark.parametrize("name", ["a b", "$x", "é"])
def test_a_temporary_folder_that_a_shell_reads_otherwise_holds_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The backend starts an engine by a shell, and waits for it for ever."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(Refused, match=f"temporary files is '.*{re.escape(name)}'.*; set TMPDIR to"):
        Home()
    assert not os.listdir(tmp_path / name)


def test_only_homes_of_the_dead_are_removed() -> None:
    mine = Home()
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True)
    theirs = Path(owner.stdout.readline().strip())
    strange = Path(tempfile.mkdtemp(prefix=homes.PREFIX))  # no owner's file: who knows
    remove_stale()
    assert mine.path.is_dir() and theirs.is_dir() and strange.is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    following = Home()
    assert not theirs.exists() and mine.path.is_dir() and strange.is_dir()
    for home in (mine, following):
        home.remove()
    strange.rmdir()


def test_what_a_dead_server_shared_stays_if_its_temporary_folder_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or is gone. A server that lives keeps its own, wherever its folder is."""
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path / "other"))
        owners = [
            subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True) for _ in range(2)
        ]
    dead, alive = (Path(owner.stdout.readline().strip()) for owner in owners)
    for path in (dead, alive):
        (tmp_path / f"shm/{path.name}-region").touch()
    (tmp_path / f"shm/{homes.PREFIX}abcdefgh-region").touch()  # without an owner's file: who knows
    owners[0].send_signal(signal.SIGKILL)
    owners[0].communicate()
    shutil.rmtree(tmp_path / "other")
    remove_stale()
    left = {path.name.removeprefix(homes.PREFIX) for path in (tmp_path / "shm").iterdir()}
    mine = alive.name.removeprefix(homes.PREFIX)
    parts = ("region", "owner", "beats", "stages", "doors")
    assert left == {"abcdefgh-region", *(f"{mine}-{part}" for part in parts)}
    owners[1].kill()
    owners[1].communicate()
    remove_stale()
    assert [path.name for path in (tmp_path / "shm").iterdir()] == [f"{homes.PREFIX}abcdefgh-region"]


def test_a_home_into_which_a_dead_servers_process_still_writes_stays_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's cache of a model's code, while the folder is removed."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True)
    theirs = Path(owner.stdout.readline().strip())
    (theirs / "models").mkdir()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    remove = shutil.rmtree

    def write_too(path: Path, ignore_errors: bool) -> None:
        remove(path, ignore_errors=ignore_errors)
        path.mkdir()

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", write_too)
        remove_stale()
    assert len(list(tmp_path.glob(f"{homes.PREFIX}*"))) == 1 and not theirs.exists()
    remove_stale()
    assert not list(tmp_path.glob(f"{homes.PREFIX}*"))


def test_an_engine_of_a_killed_server_waits_for_it_for_ever() -> None:
    """Under a server that holds their mutex: nobody told it that it should end."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True)
    theirs, mine = Path(owner.stdout.readline().strip()), Home()
    waiting = []
    for home in (theirs, mine.path):
        (home / "stub").symlink_to(shutil.which("sleep"))
        waiting.append(subprocess.Popen([home / "stub", "1000"]))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    remove_stale()
    assert waiting[0].wait(60) == -signal.SIGKILL and not theirs.exists()
    assert waiting[1].poll() is None, "its server lives"
    waiting[1].kill()
    waiting[1].wait()
    mine.remove()


def test_a_home_that_was_taken_for_a_dead_one_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being made and being locked."""
    make, made = tempfile.mkdtemp, []

    def meddle(prefix: str) -> str:
        made.append(make(prefix=prefix))
        return made[-1]

    touch, lost = Path.touch, []

    def touch_and_lose(path: Path, mode: int = 0o666) -> None:
        touch(path, mode)
        is_shared = path.name != homes.OWNER
        if is_shared not in lost:
            lost.append(is_shared)
            remove_stale()
            assert not path.exists()

    monkeypatch.setattr(tempfile, "mkdtemp", meddle)
    monkeypatch.setattr(Path, "touch", touch_and_lose)
    home = Home()
    assert len(made) == 2 and str(home.path) == made[1] and home.path.is_dir() and not os.path.exists(made[0])
    remove_stale()
    assert home.beats.is_dir() and (homes.SHARED_MEMORY / f"{home.path.name}-owner").is_file()
    home.remove()


def test_the_lock_of_an_owner_that_is_gone_is_taken_for_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start may remove the file just before it is locked: then two would own what is there."""
    owner, lock = tmp_path / homes.OWNER, fcntl.flock
    owner.touch()

    def replace_and_lock(file: int, how: int) -> None:
        owner.unlink()
        owner.touch()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    assert homes._lock(owner) is None
    monkeypatch.setattr(fcntl, "flock", lock)
    found = homes._lock(owner)
    assert found is not None
    os.close(found)


def dead(path: Path) -> Path:
    """A folder as a killed server leaves it: nobody holds its lock."""
    path.mkdir()
    (path / homes.OWNER).touch()
    (path / "models").mkdir()
    return path


def test_a_folder_with_a_star_in_its_name_removes_regions_of_running_servers(tmp_path: Path) -> None:
    mine = Home()
    region = tmp_path / f"shm/{mine.shm_prefix}region"
    region.touch()
    for name in ("*", "????????", "[a-z]*"):
        dead(tmp_path / f"{homes.PREFIX}{name}")
    remove_stale()
    assert region.exists() and mine.beats.is_dir()
    for name in (f"{homes.PREFIX}?*", "*"):
        homes._remove(dead(tmp_path / name))
    assert region.exists() and mine.beats.is_dir(), "the name is a pattern"
    mine.remove()


def test_a_link_in_tmp_removes_the_folder_that_it_names(tmp_path: Path) -> None:
    project = dead(tmp_path / "project")
    (tmp_path / f"{homes.PREFIX}abcdefgh").symlink_to(project)
    remove_stale()
    assert (project / "models").is_dir() and (project / homes.OWNER).is_file()
    linked = dead(tmp_path / f"{homes.PREFIX}bcdefghi")  # its lock would be that of another file
    (linked / homes.OWNER).unlink()
    (linked / homes.OWNER).symlink_to(project / homes.OWNER)
    remove_stale()
    assert (linked / "models").is_dir()


def test_a_folder_or_region_of_another_user_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs as root could."""
    theirs = dead(tmp_path / f"{homes.PREFIX}abcdefgh")
    region = tmp_path / f"shm/{theirs.name}-region"
    region.touch()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    remove_stale()
    assert (theirs / "models").is_dir() and region.exists()
    homes._remove(theirs)
    assert region.exists()
    monkeypatch.undo()


def test_regions_of_a_server_are_read_by_other_users(tmp_path: Path) -> None:
    home = Home()
    mine, other = tmp_path / f"shm/{home.shm_prefix}region", tmp_path / "shm/hemiola-serve-other-region"
    for region in (mine, other):
        region.touch(mode=0o644)
    homes.hide(home.beats)
    assert (mine.stat().st_mode & 0o777, other.stat().st_mode & 0o777) == (0o600, 0o644)
    assert home.beats.stat().st_mode & 0o777 == 0o700
    home.remove()


def test_a_region_that_goes_meanwhile_keeps_an_engine_from_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    home, there = Home(), homes._is_ours
    (region := homes.SHARED_MEMORY / f"{home.shm_prefix}region").touch()

    def goes(path: Path, *kind: Callable[[int], bool]) -> bool:
        found = there(path, *kind)
        if path == region:
            region.unlink()
        return found

    monkeypatch.setattr(homes, "_is_ours", goes)
    homes.hide(home.beats)
    monkeypatch.undo()
    home.remove()


def test_a_start_waits_for_ever_for_a_name_that_another_user_has_taken(tmp_path: Path) -> None:
    (owner := tmp_path / "shm/hemiola-serve-a-owner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="is another user's, or a link; start again"):
        homes._own(owner)
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_server_shares_in_memory_is_read_by_other_users() -> None:
    home = Home()
    assert home.beats.stat().st_mode & 0o077 == 0
    home.remove()
