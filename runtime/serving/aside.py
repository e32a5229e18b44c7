"""A process beside a server that reads large bodies: no stream waits for Python's lock meanwhile.

It is started with the first of them. Its parent writes jobs to its stdin, and reads what came of them from
its stdout: functions, arguments and results, pickled. It ends with its parent: as its stdin is closed, or by
the kernel's signal while it works.
"""

import ctypes
import fcntl
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from hemiola.runtime.errors import Lost
from hemiola.runtime.processes import environment

COMMAND = (sys.executable, "-P", "-m", "hemiola.runtime.serving.aside")
HEAD = struct.Struct("<QQ")  # bytes of what is pickled, and of the body behind it
PR_SET_PDEATHSIG = 1
NICE = 5  # streams go first
PIPE_BYTES = 2**20
ENDED = "the process that reads large bodies has ended; send the request again"
Made = TypeVar("Made")


class Aside:
    """The parent's side. Threads take turns. `known`: objects that are not sent again and again, by name;
    results may hold them, and then hold the parent's own."""

    def __init__(self, known: Mapping[str, object] | None = None) -> None:
        self._known = dict(known or {})
        self._first = _pickled(self._known, {})  # now, before anybody waits: a tokenizer takes half a second
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def run(self, function: Callable[..., Made], body: bytes | bytearray, *arguments: object) -> Made:
        """What function(body, *arguments) returns or raises there. Lost if the process ends."""
        with self._turn:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._end()  # since the last one
                process = self._process or self._start()
                assert process.stdin is not None and process.stdout is not None
                _write(process.stdin, (function, arguments), self._known, body)
                failed, result = _read(process.stdout, self._known)[0]
            except (OSError, EOFError):
                self._end()
                raise Lost(ENDED) from None
        if failed:
            raise result
        return result

    def close(self) -> None:
        """Whoever waits for it raises Lost."""
        self._closed = True
        self._kill()
        if self._turn.acquire(blocking=False):  # else whoever has the turn does it
            self._end()
            self._turn.release()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise EOFError
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment(),
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._process = process
        assert process.stdin is not None
        with suppress(OSError):  # a user may have so many bytes of pipes only
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        _send(process.stdin, self._first, b"")
        if self._closed:
            self._kill()
        return process

    def _kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _end(self) -> None:
        self._kill()
        if (process := self._process) is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._process = None


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, known: Mapping[str, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = {id(value): name for name, value in known.items()}

    def persistent_id(self, obj: object) -> str | None:
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: str) -> object:
        return self._known[pid]


def _pickled(value: object, known: Mapping[str, object]) -> memoryview:
    content = io.BytesIO()
    _Pickler(content, known).dump(value)
    return content.getbuffer()


def _write(pipe: Any, value: object, known: Mapping[str, object], body: bytes | bytearray) -> None:
    _send(pipe, _pickled(value, known), body)


def _send(pipe: Any, pickled: memoryview, body: bytes | bytearray) -> None:
    """The body is not pickled: that would copy it with Python's lock held."""
    for part in (HEAD.pack(len(pickled), len(body)), pickled, body):
        rest = memoryview(part)
        while rest:
            rest = rest[pipe.write(rest) :]


def _read(pipe: Any, known: Mapping[str, object]) -> tuple[Any, bytearray]:
    pickled_len, body_len = HEAD.unpack(_all(pipe, HEAD.size))
    value = _Unpickler(io.BytesIO(_all(pipe, pickled_len)), known).load()
    return value, _all(pipe, body_len)


def _all(pipe: Any, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    rest = memoryview(content)
    while rest:
        if not (num := pipe.readinto(rest)):
            raise EOFError
        rest = rest[num:]
    return content


def _done(
    function: Callable[..., object], body: bytearray, arguments: tuple[object, ...]
) -> tuple[bool, object]:
    """Whether it raised, and what it returned or raised."""
    try:
        return False, function(body, *arguments)
    except Exception as error:
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return True, error
        traceback.print_exc()
        return True, RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    jobs, results = (os.fdopen(os.dup(fd), mode, buffering=0) for fd, mode in ((0, "rb"), (1, "wb")))
    os.dup2(2, 1)  # whoever prints does not write into a result
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    known = _read(jobs, {})[0]
    os.nice(NICE)  # not before it has begun: the first body waits for that
    with suppress(EOFError, BrokenPipeError):  # the parent has ended, or has closed it
        while True:
            (function, arguments), body = _read(jobs, known)
            done = _done(function, body, arguments)
            del body
            try:
                _write(results, done, known, b"")
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # before a byte of it went
                _write(results, (True, RuntimeError(f"{type(error).__name__}: {error}")), known, b"")


if __name__ == "__main__":
    main()
