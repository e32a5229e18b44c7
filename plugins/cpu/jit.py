"""Compiles the CPU's kernels, keeps what was compiled, and shares their work between threads."""

import atexit
import ctypes
import hashlib
import inspect
import logging
import operator
import os
import pickle
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numba
import numba.core.config as _config
import torch
from torch import Tensor

from hemiola.plugins.cpu.simd import CPU, MOST_ARGUMENTS, get_long, invoke, next_of

log = logging.getLogger("hemiola")
WORTH_A_THREAD = 30_000  # nanoseconds of work
_LOCK = threading.RLock()  # of numba's settings, and of what is compiled
config: Any = _config  # numba makes its settings at run time


def cache_dir() -> Path:
    """Where compiled kernels are kept: a folder of the user's for these sources and this kind of CPU."""
    digest = hashlib.sha256(repr(CPU).encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "hemiola" / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        pass
    folder = Path(tempfile.mkdtemp(prefix="hemiola-kernels-"))  # compiled once per process
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call."""
    return _cached(lambda: numba.njit(function, cache=True, error_model="numpy"))


class _Local(threading.local):
    """What a thread that calls kernels keeps from call to call."""

    def __init__(self) -> None:
        self.call = bytearray(8 * (6 + MOST_ARGUMENTS))  # see _work
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.call))
        self.buffer = torch.empty(0, dtype=torch.uint8)  # scratch memory


_LOCAL = _Local()


class Entry:
    """A function of int64 numbers that Python calls without its lock (`ctypes`)."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        ENTRIES.append(self)

    def compile(self) -> Any:
        """Do it now, if it has not been done."""
        count = len(inspect.signature(self._function).parameters)
        signature = numba.types.void(*[numba.types.int64] * count)
        return _cached(lambda: _compile(signature, self._function))

    @cached_property
    def ctypes(self) -> Any:
        return self.compile().ctypes


ENTRIES: list[Entry] = []


class Kernel:
    """Compiled C code `function(item, scratch, *arguments)`, called once for every item of work.

    All of them are int64: `scratch` is the address of memory of the thread's own, and an argument is a
    number, the address of a tensor, or the bits of an fp32 number (simd.from_bits). Items are shared by as
    many threads as torch may use and the work is worth. It is compiled when it is first called, or loaded
    if a process did so before.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.name = function.__name__
        self.arguments = tuple(inspect.signature(function).parameters)[2:]
        if len(self.arguments) > MOST_ARGUMENTS:
            raise TypeError(f"{self.name} takes {len(self.arguments)} arguments, more than {MOST_ARGUMENTS}")
        self._pack = struct.Struct(f"{6 + len(self.arguments)}q").pack_into
        KERNELS.append(self)

    def __call__(
        self,
        num_items: int,
        nanoseconds: float,
        *arguments: Any,  # int, float or tensor
        scratch: int = 0,
    ) -> None:
        """`nanoseconds` of work, roughly, for one thread; `scratch` bytes for each thread."""
        self.check_count(arguments)
        values: list[int] = [
            value
            if value.__class__ is int
            else value.data_ptr()
            if value.__class__ is Tensor
            else _word(value)
            for value in arguments
        ]
        num_threads = min(torch.get_num_threads(), num_items) if nanoseconds > WORTH_A_THREAD else 1
        scratch += -scratch % 64  # a cache line
        room = _scratch(num_threads, scratch) if scratch else 0
        self._pack(_LOCAL.call, 0, 0, 0, num_items, room, scratch, self.address, *values)
        if num_threads > 1 and _TEAM is not None:
            _TEAM(_start().address, _LOCAL.address, num_threads, 0)
        else:
            _start().ctypes(_LOCAL.address)

    def check_count(self, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != len(self.arguments):
            raise TypeError(
                f"{self.name} takes {len(self.arguments)} arguments ({', '.join(self.arguments)}), "
                f"not {len(arguments)}"
            )

    @cached_property
    def address(self) -> int:
        return self.compile().address

    def compile(self) -> Any:
        """Do it now, if it has not been done."""
        signature = numba.types.void(*[numba.types.int64] * (2 + len(self.arguments)))
        return _cached(lambda: _compile(signature, self._function))


KERNELS: list[Kernel] = []


def _work(call):
    """A thread's part of a call: the next item until there is none.

    call: the next item, the next thread, the number of items, scratch memory, its bytes per thread, the
    kernel, its arguments.
    """
    scratch = get_long(call, 3) + next_of(call + 8) * get_long(call, 4)
    num_items, kernel = get_long(call, 2), get_long(call, 5)
    while True:
        item = next_of(call)
        if item >= num_items:
            break
        invoke(kernel, item, scratch, call + 48)


@lru_cache
def _start() -> Any:
    return _cached(lambda: _compile(numba.types.void(numba.types.int64), _work))


@lru_cache
def _compile(signature: Any, function: Callable[..., None]) -> Any:
    return numba.cfunc(signature, cache=True, error_model="numpy")(function)


def prepare() -> None:
    """Compile every kernel, or load what was compiled before, so that no request waits for it."""
    if not any(_CACHE_DIR.rglob("*.nbc")):
        log.warning("compiling the CPU's kernels, once per user and machine: about 15 seconds")
    _start()
    for function in (*ENTRIES, *KERNELS):
        function.compile()


def _word(value: float | torch.Tensor) -> int:
    """What a kernel gets for an argument."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return bits(value) if isinstance(value, float) else operator.index(value)


def bits(number: float) -> int:
    """The bits of an fp32 number."""
    return int.from_bytes(struct.pack("f", number), sys.byteorder)


def _scratch(num_threads: int, size: int) -> int:
    """The address of memory for a team of this thread's, kept for its next calls."""
    if _LOCAL.buffer.numel() < num_threads * size:
        _LOCAL.buffer = torch.empty(num_threads * size, dtype=torch.uint8)
    return _LOCAL.buffer.data_ptr()


def _cached(compile_: Callable[[], Any]) -> Any:
    """With numba told where to look for what is compiled already, and for these functions only."""
    with _LOCK:
        before, config.CACHE_DIR = config.CACHE_DIR, str(_CACHE_DIR)
        try:
            return compile_()
        except (pickle.UnpicklingError, EOFError, ValueError, RuntimeError, LookupError) as error:
            log.warning("compiled kernels in %s are damaged (%s): they are made again", _CACHE_DIR, error)
            for file in [file for file in _CACHE_DIR.rglob("*.nb[ci]") if file.is_file()]:
                file.unlink(missing_ok=True)
            return compile_()
        finally:
            config.CACHE_DIR = before


def _team() -> Any:
    """Starts a function on the threads of torch's OpenMP pool; a second pool would fight for the cores."""
    try:
        start = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):  # torch was built with another OpenMP: one thread
        return None
    start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


def _alone() -> None:
    """A forked child has none of the pool's threads: a team would wait for them for ever."""
    global _LOCK, _TEAM
    _LOCK, _TEAM = threading.RLock(), None


_CACHE_DIR = cache_dir()
_TEAM = _team()
os.register_at_fork(after_in_child=_alone)
