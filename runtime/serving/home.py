"""A server's folder, what it has in shared memory, and what servers that were killed have left of both."""

import contextlib
import fcntl
import glob
import os
import re
import shlex
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hemiola.runtime.errors import Refused, shown

PREFIX = "hemiola-serve-"
OWNER = "owner"  # a file that is locked while the folder's owner lives, by the kernel's word
SHARED_OWNER = f"-{OWNER}"  # ends the name of another in shared memory, for the folder may be gone
GONE = "-gone"  # ends the name of a folder that is being removed
NAME = re.compile(rf"{PREFIX}[a-z0-9_]+({GONE})?")  # as mkdtemp writes it
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENTS = Path("/tmp")  # whatever TMPDIR says
SERVER = "tritonserver"  # the name of a process that may have such a folder


class Home:
    """Made when opened, gone when removed. Nobody else's next start removes it while we live."""

    def __init__(self) -> None:
        folder = tempfile.gettempdir()
        if shlex.quote(folder) != folder:  # the Python backend starts engines by a shell, and waits for ever
            message = f"the folder for temporary files is {shown(folder)}, which tritonserver cannot use"
            way_out = "set TMPDIR to one whose path needs no quotes in a shell, such as /tmp"
            raise Refused("unsupported", message=message, way_out=way_out)
        remove_stale()
        self.environments = Environments()
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            (self.path / OWNER).touch()
            lock = _lock(self.path / OWNER)  # not if somebody's remove_stale came in between
        self._locks = [lock, _own(_shared_owner(self.path))]
        self.shm_prefix = f"{self.path.name}-"  # of everything of ours in shared memory
        self.beats = SHARED_MEMORY / f"{self.shm_prefix}beats"  # a full disk is no dead engine
        self.beats.mkdir(mode=0o700)
        self.stages = SHARED_MEMORY / f"{self.shm_prefix}stages"  # of engines that start
        self.stages.mkdir(mode=0o700)
        self.doors = SHARED_MEMORY / f"{self.shm_prefix}doors"  # a socket's path has at most 107 bytes
        self.doors.mkdir(mode=0o700)

    def remove(self) -> None:
        _remove(self.path)
        self.environments.remove()
        for lock in self._locks:
            os.close(lock)


class Environments:
    """The empty folder that tritonserver's Python backend makes at each start, and leaves when it is killed.

    Nothing says whose one is, and a server aborts at its end if its own is missing. So only those go that
    were made while ours started, and only if no other server runs now.
    """

    def __init__(self) -> None:
        self._before = self._found()
        self._made: set[Path] = set()

    def note(self) -> None:
        """Our server has started."""
        self._made = self._found() - self._before

    def remove(self) -> None:
        """Our server is gone."""
        if self._made and not any(map(_is_server, Path("/proc").glob("[0-9]*"))):
            for path in self._made:
                with contextlib.suppress(OSError):  # not empty, or gone
                    path.rmdir()

    def _found(self) -> set[Path]:
        return {path for path in ENVIRONMENTS.glob("python_env_*") if _is_ours(path, stat.S_ISDIR)}


def _is_server(process: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return (process / "comm").read_text(errors="replace").startswith(SERVER)
    return False


def hide(beats: Path) -> None:
    """The regions in shared memory of the server with this folder of heartbeats. Requests and answers pass
    through them, and tritonserver lets everybody on the machine read them, whatever the umask is."""
    for path in beats.parent.glob(f"{glob.escape(beats.name.removesuffix('beats'))}*"):
        if _is_ours(path, stat.S_ISREG):
            with contextlib.suppress(FileNotFoundError):  # of a model that was unloaded just now
                path.chmod(0o600)


def remove_stale() -> None:
    """What is left of servers whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _lock(path / OWNER) if NAME.fullmatch(path.name) and _is_ours(path, stat.S_ISDIR) else None
        if lock is not None:
            try:
                _end_processes(path)
                _remove(path)
            finally:
                os.close(lock)
    for owner in SHARED_MEMORY.glob(f"{PREFIX}*{SHARED_OWNER}"):  # of folders that are elsewhere, or gone
        name = owner.name.removesuffix(SHARED_OWNER)
        lock = _lock(owner) if NAME.fullmatch(name) else None
        if lock is not None:
            _remove_shared(name)
            os.close(lock)


def _shared_owner(path: Path) -> Path:
    return SHARED_MEMORY / f"{path.name}{SHARED_OWNER}"


def _own(owner: Path) -> int:
    """The lock of a file that is made; again, if somebody's remove_stale came in between. Raises Refused
    where another user was sooner, who may see the folder's name in /tmp."""
    lock = None
    while lock is None:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        lock = _lock(owner)
        if lock is None and os.path.lexists(owner) and not _is_ours(owner, stat.S_ISREG):
            message = f"{owner} is another user's, or a link"
            raise Refused("in_use", message=message, way_out="start again")
    return lock


def _is_ours(path: Path, is_kind: Callable[[int], bool] = bool) -> bool:
    """Everybody may write to /tmp and /dev/shm: what another user made, or a link, is not ours to remove."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return is_kind(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _lock(owner: Path) -> int | None:
    """A descriptor that holds this file's lock; None if somebody else does, or it is not ours to have."""
    if not _is_ours(owner, stat.S_ISREG):
        return None
    try:
        lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), owner.stat()):
            return lock
    os.close(lock)
    return None


def _end_processes(path: Path) -> None:
    """Of a killed server's engine, which may wait for it for ever: for a mutex that it held."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if cmdline.read_bytes().startswith(f"{path}/".encode()):
                os.kill(int(cmdline.parent.name), signal.SIGKILL)


def _remove(path: Path) -> None:
    """Under another name, for an engine may still write to this one; the owner's file last, for what is left
    then is the next start's."""
    _remove_shared(path.name)
    with contextlib.suppress(OSError):
        path = path.rename(path.with_name(path.name.removesuffix(GONE) + GONE))
    for inner in path.glob("*"):
        if inner.name != OWNER:
            _drop(inner)
    if [inner.name for inner in path.glob("*")] == [OWNER]:
        _drop(path)


def _remove_shared(name: str) -> None:
    """The owner's file last, for what is left then is the next start's."""
    owner = SHARED_MEMORY / f"{name}{SHARED_OWNER}"
    regions = [path for path in SHARED_MEMORY.glob(f"{glob.escape(name)}-*") if path != owner]
    regions = [path for path in regions if _is_ours(path)]
    for path in regions:
        _drop(path)
    if _is_ours(owner) and not any(path.exists() for path in regions):
        _drop(owner)


def _drop(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
