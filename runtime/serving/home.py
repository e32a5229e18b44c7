"""A server's folder, what it has in shared memory, and what servers that were killed have left of both."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "hemiola-serve-"
OWNER = "owner"  # a file that is locked while the folder's owner lives, by the kernel's word
SHARED_MEMORY = Path("/dev/shm")


class Home:
    """Made when opened, gone when removed. Nobody else's next start removes it while we live."""

    def __init__(self) -> None:
        remove_stale()
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            (self.path / OWNER).touch()
            lock = _lock(self.path)  # not if somebody's remove_stale came in between
        self._lock = lock
        self.shm_prefix = f"{self.path.name}-"  # of everything of ours in shared memory
        self.beats = SHARED_MEMORY / f"{self.shm_prefix}beats"  # a full disk is no dead engine
        self.beats.mkdir()

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._lock)


def remove_stale() -> None:
    """What is left of servers whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _lock(path)
        if lock is not None:
            _remove(path)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """A descriptor that holds this folder's lock; None if somebody else does, or it is not ours to have."""
    try:
        found = os.open(path / OWNER, os.O_RDWR)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / OWNER).exists():
            return found
    os.close(found)
    return None


def _remove(path: Path) -> None:
    """The owner's file last: what somebody still writes there meanwhile, the next start removes."""
    ours = (inner for inner in path.glob("*") if inner.name != OWNER)
    for inner in (*SHARED_MEMORY.glob(f"{path.name}-*"), *ours):
        if inner.is_dir():
            shutil.rmtree(inner, ignore_errors=True)
        else:
            inner.unlink(missing_ok=True)
    if [inner.name for inner in path.glob("*")] == [OWNER]:
        shutil.rmtree(path, ignore_errors=True)
