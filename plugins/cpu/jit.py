"""Compiles the CPU's kernels, and keeps what was compiled."""

import fcntl
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core.errors import NumbaError

from hemiola.plugins.cpu.cache import Locator, cache_dir, config, is_kept

LOCATOR = f"{Locator.__module__}.{Locator.__name__}"
log = logging.getLogger("hemiola")
_LOCK = threading.RLock()  # of numba's settings, and of what is compiled


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call."""
    made = _cached(lambda: numba.njit(function, cache=_CACHE_DIR is not None, error_model="numpy"))
    _HELPERS.append(made)
    return made


class CFunction:
    """Compiled C code of a function of int64 numbers, made when it is first wanted.

    Python calls it by `ctypes`, without its own lock, C by its address.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Any = None
        self.name = function.__name__
        self.arguments = tuple(inspect.signature(function).parameters)
        KERNELS.append(self)

    def is_kept(self) -> bool:
        """Whether this process has compiled it, or an earlier one."""
        return self._compiled is not None or (_CACHE_DIR is not None and is_kept(self._function, _CACHE_DIR))

    def compile(self) -> Any:
        """Do it now, if it has not been done by us or by an earlier process."""
        signature = numba.types.void(*[numba.types.int64] * len(self.arguments))
        if self._compiled is None:  # or who has it would wait for another process that compiles it
            with _alone(f"{self._function.__module__}.{self.name}"):
                self._compiled = _cached(lambda: _compile(signature, self._function))
            if not self._compiled.cache_hits:
                _say_that_it_takes_long()
        return self._compiled

    @cached_property
    def address(self) -> int:
        return self.compile().address

    @cached_property
    def ctypes(self) -> Any:
        return self.compile().ctypes


KERNELS: list[CFunction] = []
_HELPERS: list[Any] = []


@lru_cache
def _compile(signature: Any, function: Callable[..., None]) -> Any:
    return numba.cfunc(signature, cache=_CACHE_DIR is not None, error_model="numpy")(function)


@lru_cache
def _say_that_it_takes_long() -> None:
    """Once per process: there are about a hundred of them, and one was not kept."""
    often = "in each process" if _CACHE_DIR is None else f"once per user and machine; kept in {_CACHE_DIR}"
    log.warning("compiling kernels for this CPU, %s", often)


def prepare(report: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Compile every kernel, or load what was compiled before, so that no request waits for it.

    report: gets how many of the missing kernels are compiled, and how many were missing."""
    missing = [kernel for kernel in KERNELS if not kernel.is_kept()]
    for kernel in KERNELS:
        if kernel not in missing:  # before the disk turns out to be full
            kernel.compile()
    for done, kernel in enumerate(missing):
        report(done, len(missing))
        kernel.compile()
        report(done + 1, len(missing))


def _cached(compile_: Callable[[], Any]) -> Any:
    """With numba told where to look for what is compiled already, and for these functions only."""
    with _LOCK:
        if _CACHE_DIR is None:
            return compile_()
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(_CACHE_DIR), LOCATOR
        try:
            return _unless_damaged(compile_, _CACHE_DIR)
        except OSError as error:
            _keep_nothing(error)
            return compile_()
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def _unless_damaged(compile_: Callable[[], Any], folder: Path) -> Any:
    """Else again, from nothing."""
    try:
        return compile_()
    except (OSError, NumbaError):
        raise
    except Exception as error:  # a pickle with one other bit may raise any
        log.warning("compiled kernels in %s are damaged (%s): they are made again", folder, error)
        for file in [file for file in folder.rglob("*.nb[ci]") if file.is_file()]:
            file.unlink(missing_ok=True)
        return compile_()


def _keep_nothing(error: OSError) -> None:
    """From here on; what was read goes on. A full disk is no reason to open no engine."""
    global _CACHE_DIR
    way_out = "free some room there, or set XDG_CACHE_HOME to another folder"
    log.warning(
        "compiled kernels cannot be kept in %s (%s); %s", _CACHE_DIR, error.strerror or error, way_out
    )
    _CACHE_DIR = None
    for made in _HELPERS:
        made._cache.disable()


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Of processes that want a kernel at once, one compiles it; the others wait, and load it."""
    try:
        file = os.open(f"{_CACHE_DIR or os.devnull}/{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # nothing is kept, no place is left, or no right
        yield
        return
    try:
        with suppress(OSError):  # a disk that knows no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a child that was forked meanwhile has it open, too
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _forked() -> None:
    """Another thread may have held the lock when the child was made."""
    global _LOCK
    _LOCK = threading.RLock()


_CACHE_DIR = cache_dir()
os.register_at_fork(after_in_child=_forked)
