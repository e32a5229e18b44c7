"""A file per model that says when its process and its threads were last seen to move.

The model writes it, whoever started the server reads it. Times are time.monotonic's, which all processes of a
machine share and no change of the clock touches.
"""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BEAT_S = 0.25
PAUSE_S = 5.0  # between two looks: whoever looks was stopped meanwhile


class Beat(NamedTuple):
    pid: int
    time: float  # of this beat
    engine_s: float  # for so long the engine's thread has not come by, though it has work
    replies_s: float  # and the thread that hands answers to tritonserver
    num_open: int  # answers under way
    failure: str = ""  # why the engine is lost


def write(path: Path, beat: Beat) -> None:
    """Whole or not at all. Without room over the one before, which has its own."""
    draft, text = _draft(path), json.dumps(beat)
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        with path.open("r+b") as before:
            before.write(text.ljust(os.fstat(before.fileno()).st_size).encode())


def _draft(path: Path) -> Path:
    """No model's name begins with a dot."""
    return path.with_name(f".{path.name}")


def read(path: Path) -> Beat | None:
    """The last beat of a model; None if it is not loaded, or this process has no file left to look with."""
    try:
        return Beat(*json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def trouble(path: Path, hang_s: float) -> str:
    """What is wrong with a model that writes this file; "" if nothing is, or if it is not loaded."""
    beat = read(path)
    if beat is None:
        return ""
    name = path.name
    if beat.failure:
        return f"{name}: {beat.failure}"
    if not _alive(beat.pid):
        return f"{name}: its process {beat.pid} has ended" if path.exists() else ""
    silent_s = time.monotonic() - beat.time
    for what, seconds in (
        (f"process {beat.pid} has not moved", silent_s),
        ("engine has been in one step", beat.engine_s),
        ("tritonserver has taken no answer", beat.replies_s),
    ):
        if seconds > hang_s:
            return f"{name}: its {what} for {seconds:.0f} s (--hang-timeout)"
    return ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process has no file left to look with
        return True


def remove(path: Path) -> None:
    """The model is unloaded."""
    path.unlink(missing_ok=True)
    _draft(path).unlink(missing_ok=True)


def now(engine_s: float, replies_s: float, num_open: int, failure: str) -> Beat:
    """Of this process."""
    return Beat(os.getpid(), time.monotonic(), engine_s, replies_s, num_open, failure)


class Awake:
    """For how long whoever looks has done so without a gap. A container that is paused stops all its
    processes: when it goes on, none of them has hung."""

    def __init__(self) -> None:
        self._since, self._last = -math.inf, time.monotonic()

    def look(self) -> float:
        """Seconds."""
        now = time.monotonic()
        if now - self._last > PAUSE_S:
            self._since = now
        self._last = now
        return now - self._since


class Clock:
    """A thread that does the same again and again."""

    def __init__(
        self, name: str, seconds: float, act: Callable[[], None], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._seconds = seconds
        self._act = act
        self._on_error = on_error  # gets the thread's name and the error
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._act()
            except Exception as error:  # it may be better next time
                self._on_error(self._thread.name, error)
            if self._over.wait(self._seconds):
                return

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
