"""Where an engine goes: a directory that appears whole or not at all, and takes nobody's files away."""

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hemiola.builder.checkpoint import read_json
from hemiola.runtime.engine_files import strays
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.outline import FILE

WORKSHOP = ".building-"  # behind an engine directory's name
NEW = "new"  # an engine that is being built
OLD = "old"  # an engine that stood there before, for a moment
TAKEN = errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR  # what stands at a name to which a folder is renamed
AT_CWD, RENAME_EXCHANGE = -100, 2  # of renameat2
NO_MEMORY = (
    "allocate memory",
    "bad_alloc",
    "out of memory",
    "OutOfMemory",
    "can't start new thread",
    "Resource temporarily unavailable",  # a thread
)


def refuse_occupied(engine_dir: Path) -> None:
    if engine_dir.exists() and not engine_dir.is_dir():
        message = f"--engine-dir {engine_dir} is a file"
        raise Refused("not_found", "engine_dir", message=message, way_out="choose a directory")
    if engine_dir.is_mount():
        message = f"--engine-dir {engine_dir} is a mount point, which a new engine cannot replace"
        way_out = f"choose a directory in it, such as {engine_dir / 'engine'}"
        raise Refused("in_use", "engine_dir", message=message, way_out=way_out)
    if engine_dir.is_dir() and any(engine_dir.iterdir()) and not (engine_dir / FILE).is_file():
        message = f"--engine-dir {engine_dir} has files but no engine in it"
        raise Refused("in_use", "engine_dir", message=message, way_out="choose an empty or a new directory")
    if (engine_dir / FILE).is_file():
        for stray in strays(engine_dir, [FILE, *_files_of(engine_dir / FILE)]):
            message = (
                f"--engine-dir {engine_dir} has an engine and beside it {one_line(stray)}, which a new engine"
                " would remove"
            )
            raise Refused(
                "in_use", "engine_dir", message=message, way_out="move it, or choose another directory"
            )


def _files_of(path: Path) -> Iterable[str]:
    """What a manifest of any version names; a damaged one names nothing."""
    try:
        files = read_json(path).get("sha256")
    except (Refused, OSError):
        return ()
    return files if isinstance(files, dict) else ()


@contextmanager
def fresh(engine_dir: Path) -> Iterator[Path]:
    """A folder that takes the place of `engine_dir` at the end, or vanishes.

    It lies in a workshop beside it, which is locked while the build lives: what builds that were killed have
    left goes before the next one.
    """
    try:
        engine_dir = _resolved(engine_dir)
        engine_dir.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(engine_dir)
        workshop, lock = _open_workshop(engine_dir)
    except (OSError, RuntimeError) as error:  # before Python 3.13 a circle of links is no OSError
        reason = getattr(error, "strerror", "") or "links in a circle"
        message = f"--engine-dir {engine_dir} cannot be written ({reason})"
        raise Refused("failed", "engine_dir", message=message, way_out="choose another directory") from None
    folder, old = workshop / NEW, workshop / OLD
    try:
        folder.mkdir(0o755)
        yield folder
        try:
            refuse_occupied(engine_dir)  # files may have come meanwhile
            if not (engine_dir.exists() and exchanged(folder, engine_dir)):
                if engine_dir.exists():
                    engine_dir.rename(old)
                folder.rename(engine_dir)
        except (Refused, OSError) as error:
            raise _kept(folder, engine_dir, error) from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(error.strerror) from None
        if error.errno is None:  # of no file: ctypes says so of libraries
            raise
        message = f"--engine-dir {engine_dir} cannot be written ({error.strerror})"
        way_out = "free space or choose another directory"
        raise Refused("failed", "engine_dir", message=message, way_out=way_out) from None
    finally:
        _close_workshop(workshop, engine_dir)
        os.close(lock)


def _resolved(engine_dir: Path) -> Path:
    with suppress(FileNotFoundError):
        return engine_dir.resolve(strict=True)
    return engine_dir.resolve()


def exchanged(one: Path, other: Path) -> bool:
    """Whether each folder has taken the other's place, at once: there is no moment without an engine. Linux
    can, on most file systems."""
    rename: Any = getattr(ctypes.CDLL(None), "renameat2", None)
    places = AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other)
    return rename is not None and rename(*places, RENAME_EXCHANGE) == 0


def _kept(folder: Path, engine_dir: Path, error: Refused | OSError) -> Refused:
    """An engine that was built in hours is not thrown away because its place is taken: it stays beside it."""
    number = 1
    while True:
        beside = engine_dir.with_name(f"{engine_dir.name}.built-{number}")
        try:
            folder.rename(beside)
            break
        except OSError as problem:
            if problem.errno not in TAKEN:
                raise
        number += 1
    why = str(error) if isinstance(error, Refused) else f"{engine_dir} cannot be replaced ({error.strerror})"
    way_out = f"make room there and move {beside} to {engine_dir}"
    message = f"the engine is built, but {why.partition('; ')[0]}"
    return Refused("in_use", "engine_dir", message=message, way_out=way_out)


def _open_workshop(engine_dir: Path) -> tuple[Path, int]:
    """And what holds its lock."""
    while True:
        workshop = Path(tempfile.mkdtemp(prefix=f".{engine_dir.name}{WORKSHOP}", dir=engine_dir.parent))
        try:
            lock = _lock(workshop)
        except OSError:  # a file system without locks, where nobody takes it for abandoned
            return workshop, os.open(workshop, os.O_RDONLY)
        if lock is not None:
            return workshop, lock  # else another build took it for abandoned just now


def _close_workshop(workshop: Path, engine_dir: Path) -> None:
    """With all that is in it; an engine that was moved away for one that did not come returns."""
    if (workshop / OLD).exists() and not engine_dir.exists():
        (workshop / OLD).rename(engine_dir)
    shutil.rmtree(workshop, ignore_errors=True)


def _remove_abandoned(engine_dir: Path) -> None:
    for workshop in engine_dir.parent.glob(f".{glob.escape(engine_dir.name)}{WORKSHOP}*"):
        with suppress(OSError):
            lock = _lock(workshop)
            if lock is None:
                continue
            is_ours = os.fstat(lock).st_uid == os.geteuid() and {*os.listdir(lock)} <= {NEW, OLD}
            if is_ours:
                _close_workshop(workshop, engine_dir)
            os.close(lock)


def _lock(workshop: Path) -> int | None:
    """A descriptor; None while another build, or nobody any more, has it. Raises OSError: no locks here, or
    no folder."""
    try:
        lock = os.open(workshop, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = workshop.exists()
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    if not is_ours:
        os.close(lock)
    return lock if is_ours else None


def says_lack_of_memory(words: str) -> bool:
    """Of compilers and libraries, which have no error of their own for it."""
    return any(sign in words for sign in NO_MEMORY)


@contextmanager
def memory_in_one_line() -> Iterator[None]:
    """Whoever finds that memory has run out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = one_line(error) or "a Python object found no room"
        if not isinstance(error, MemoryError) and not says_lack_of_memory(reason):
            raise
        message = f"this machine has too little memory for the build ({reason})"
        way_out = "free some, or build on a larger one: an engine may be copied"
        raise Refused("exhausted", message=message, way_out=way_out) from None
