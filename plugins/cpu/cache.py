"""Where compiled kernels are kept: by what they are made of, never by the path of their source."""

import grp
import hashlib
import logging
import os
import pwd
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.core.config as _config

from hemiola.plugins.cpu.registers import CPU

PACKAGE = Path(__file__).parent.parent.parent
FOLDER = re.compile("[0-9a-f]{16}")
IMPORT = re.compile(r"^\s*(?:from|import) (hemiola[\w.]*)(?: import (?:\(([^)]*)\)|(.*)))?", re.MULTILINE)
KEPT_SECONDS = 30 * 86400  # since the folder of a CPU and a compiler was last used
KEPT_VERSIONS = 8  # of a module: several checkouts share the cache
RECENT_SECONDS = 3600  # another process may still write into a folder that was used so recently
WAY_OUT = "remove their permission to write, or set XDG_CACHE_HOME to a folder of your own"
log = logging.getLogger("hemiola")
config: Any = _config  # numba makes its settings at run time


def cache_dir() -> Path | None:
    """A folder of the user's for kernels of this kind of CPU, by these compilers; None: nothing is kept."""
    made_by = repr((CPU, sys.version_info[:2], numba.__version__, llvmlite.__version__))
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or ".")
        if not root.is_absolute():  # in the folder that somebody is in, which may be a stranger's
            root = Path.home() / ".cache"
        folder = root / "hemiola" / "kernels" / hashlib.sha256(made_by.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        own = (root, root / "hemiola", folder.parent, folder)
        if stranger := _exchangeable(root) or _of_others(own):
            log.warning(
                "others may write to %s, so compiled kernels are not kept there; %s", stranger, WAY_OUT
            )
        elif os.access(folder, os.W_OK):
            os.utime(folder)
            if folder.stat().st_uid == os.geteuid():
                folder.chmod(0o700)  # so that what is put there later is ours, too, whatever the umask is
            others = (other for other in folder.parent.iterdir() if FOLDER.fullmatch(other.name))
            _remove(others, KEPT_SECONDS)
            return folder
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        pass
    return None


def _exchangeable(root: Path) -> Path | None:
    """A folder above it in which everybody may put another in its place."""
    for folder in {*root.parents, *root.resolve().parents}:
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return folder
    return None


def _of_others(folders: Sequence[Path]) -> Path | None:
    """The first of these, each in the one before, where somebody else may put files. numba runs what it finds
    there, so it must be the user's own or root's; in those above the last, others may have files of their
    own."""
    for folder in folders:
        status = folder.stat()
        mode = status.st_mode
        by_others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid))
        is_open = by_others and (folder == folders[-1] or not mode & stat.S_ISVTX)
        if is_open or not _owners(folder) <= {0, os.geteuid()}:
            return folder
    return None


def _is_private(group: int) -> bool:
    """Whether only the user and root are in it: root's, or one of the user's name, as most systems have."""
    if group == 0:
        return True
    try:
        own, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # nobody knows who is in it
        return False
    return group == own.pw_gid and found.gr_name == own.pw_name and {*found.gr_mem} <= {own.pw_name}


def _owners(folder: Path) -> set[int]:
    """Of a folder, and of the link that leads to it."""
    return {folder.lstat().st_uid, folder.stat().st_uid}


class Locator:
    """Where numba keeps a function's code. numba's own locators go by the path of the source, but a server
    imports the package through a new folder at each start."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._line = function.__code__.co_firstlineno
        self._sources = sources(Path(file))
        self._folder = _folder(function, self._sources, Path(config.CACHE_DIR))

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> "Locator":
        locator = cls(function, file)
        _use(locator._folder)
        return locator

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._sources

    def get_disambiguator(self) -> str:
        return str(self._line)


def _folder(function: Callable[..., Any], found: str, root: Path) -> Path:
    return root / f"{function.__module__}-{found[:16]}"


def is_kept(function: Callable[..., Any], root: Path) -> bool:
    """Whether compiled code of it lies there, by the name that numba gives to such files."""
    found = sources(Path(function.__code__.co_filename))
    line = function.__code__.co_firstlineno
    return any(_folder(function, found, root).glob(f"*.{function.__qualname__}-{line}.*.nbi"))


@lru_cache
def _use(folder: Path) -> None:
    """This process uses this version of a module's kernels; the oldest versions go."""
    with suppress(OSError):  # the disk is full, which matters only where there is something to keep
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    name = folder.name.rpartition("-")[0]
    versions = sorted(folder.parent.glob(f"{name}-{'[0-9a-f]' * 16}"), key=_last_used, reverse=True)
    _remove(versions[KEPT_VERSIONS:], RECENT_SECONDS)


def _remove(folders: Iterable[Path], unused_seconds: float) -> None:
    for folder in folders:
        with suppress(OSError):  # another process removes it, too
            if time.time() - folder.stat().st_mtime > unused_seconds:
                shutil.rmtree(folder)


def _last_used(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


@lru_cache
def sources(file: Path) -> str:
    """sha256 of a source and of all that it imports from this package: kernels contain the code of what they
    call and the values of the constants that they name."""
    digest, seen, left = hashlib.sha256(), {file}, [file]
    while left:
        for imported in _imports(left.pop().read_text(encoding="utf-8")):
            if imported not in seen:
                seen.add(imported)
                left.append(imported)
    for each in sorted(seen - {file}):
        digest.update(f"{each.relative_to(PACKAGE)}\n".encode() + each.read_bytes())
    digest.update(file.read_bytes())
    return digest.hexdigest()


def _imports(text: str) -> Iterator[Path]:
    for found in IMPORT.finditer(text):
        names = re.findall(r"\w+", found[2] or found[3] or "")
        for module in (found[1], *(f"{found[1]}.{name}" for name in names)):
            path = PACKAGE.joinpath(*module.split(".")[1:])
            yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
