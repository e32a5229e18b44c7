"""Compiles the CPU's kernels, keeps what was compiled, and shares their work between threads.

numba is an extra (`pip install hemiola[cpu]`); without it every op is made of torch calls.
"""

import atexit
import ctypes
import hashlib
import importlib
import logging
import os
import shutil
import struct
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("hemiola")
WORTH_A_THREAD = 30_000  # nanoseconds of work
try:
    importlib.import_module("numba")
    MISSING = ""
except ImportError as error:  # not there, or not with this numpy
    MISSING = str(error)
AVAILABLE = not MISSING
_LOCK = threading.RLock()  # of numba's settings, and of what is compiled


def cache_dir() -> Path:
    """Where compiled kernels are kept: a folder of the user's for what the plugins' sources are now."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
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
    import numba

    return _cached(lambda: numba.njit(function, cache=True, error_model="numpy"))


class Kernel:
    """Compiled C code `function(call)`, run by as many threads as torch may use and the work is worth.

    `call` is the address of int64 numbers: a counter of items that threads take from (simd.take), the number
    of items and the arguments (simd.unpack), most of them addresses. It is compiled when it is first called,
    or loaded if a process did so before.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._entry: Any = None
        KERNELS.append(self)

    def __call__(self, num_items: int, nanoseconds: float, *arguments: int) -> None:
        """`nanoseconds` of work, roughly, for one thread."""
        entry = self._entry or self.compile()
        call = array("q", (0, num_items, *arguments))
        address = call.buffer_info()[0]
        num_threads = min(torch.get_num_threads(), num_items) if nanoseconds > WORTH_A_THREAD else 1
        if num_threads > 1 and _TEAM is not None:
            _TEAM(entry.address, address, num_threads, 0)
        else:
            entry.ctypes(address)

    def compile(self) -> Any:
        """Do it now, if it has not been done."""
        import numba

        signature = numba.types.void(numba.types.int64)
        with _LOCK:
            if self._entry is None:
                self._entry = _cached(
                    lambda: numba.cfunc(signature, cache=True, error_model="numpy")(self._function)
                )
        return self._entry


KERNELS: list[Kernel] = []


def prepare() -> None:
    """Compile every kernel, or load what was compiled before, so that no request waits for it."""
    if _CACHE_DIR is None:
        _warn(
            f"numba cannot be used ({MISSING}): the CPU's kernels run as torch calls, at half the speed "
            "or less; pip install 'hemiola[cpu]'"
        )
        return
    if not (_CACHE_DIR.is_dir() and any(_CACHE_DIR.iterdir())):
        log.warning("compiling the CPU's kernels, once per user and machine: about 10 seconds")
    for kernel in KERNELS:
        kernel.compile()


@lru_cache
def _warn(text: str) -> None:
    """Once per process."""
    log.warning(text)


def _cached(compile_: Callable[[], Any]) -> Any:
    """With numba told where to look for what is compiled already, and for these functions only."""
    config: Any = importlib.import_module("numba.core.config")
    with _LOCK:
        before, config.CACHE_DIR = config.CACHE_DIR, str(_CACHE_DIR)
        try:
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


_CACHE_DIR = cache_dir() if AVAILABLE else None
_TEAM = _team()


@lru_cache(maxsize=1024)
def bits(number: float) -> int:
    """The bits of an fp32 number, as an argument of a kernel."""
    return int.from_bytes(struct.pack("f", number), sys.byteorder)


def lines(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [T, *F], copied unless the numbers of a token lie side by side; tokens may lie apart."""
    if tensor.is_contiguous() or tensor[0].is_contiguous():
        return tensor
    return tensor.contiguous()
