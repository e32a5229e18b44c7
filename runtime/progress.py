"""What a build or a start is doing now: a bar on a terminal, lines in a log.

Whoever does the work reports (stage, done, total); a total of 0 means that the stage is not counted. A stage
ends when the next one begins, or when all is done. A server shows several engines at once: each is a subject.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hemiola.runtime.errors import Refused

Report = Callable[[str, int, int], None]
READY = "ready"  # the stage behind the last one
FETCHING, WRITING, HASHING = "fetching", "writing weights", "hashing"
HASHING_CHECKPOINT = "hashing the checkpoint"
# Stages that are counted in bytes; others count kernels, graphs, tensors.
IN_BYTES = (FETCHING, WRITING, HASHING, HASHING_CHECKPOINT)
LONG_S = 5.0  # a stage that takes less gets no line in a log
MAX_S = 30.0  # between lines of a stage that goes on; the first comes after LONG_S, the next after twice that


class Display(Protocol):
    """A Report that keeps subjects apart."""

    def __call__(self, stage: str, done: int, total: int, subject: str = "") -> None: ...


def silent(stage: str, done: int, total: int, subject: str = "") -> None:
    """The Display of those who want none."""


def say_on_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


@contextmanager
def show(
    wanted: Report | bool | None, say: Callable[[str], None] | None = None, file: Any = None
) -> Iterator[Display]:
    """True: a bar if `file` (stderr) is a terminal, else lines by `say` (on stderr). False: nothing. None: as
    True on a terminal and in a notebook, else nothing. A function gets every report."""
    if callable(wanted):
        yield lambda stage, done, total, subject="": wanted(stage, done, total)
        return
    if wanted not in (True, False, None):
        way_out = "pass True, False, None or a function of (stage, done, total)"
        raise Refused("wrong_type", "progress", wanted, way_out=way_out)
    file = file or sys.stderr
    at_terminal = bool(file and file.isatty())
    in_notebook = "ipykernel" in sys.modules
    if wanted or (wanted is None and (at_terminal or in_notebook)):
        with Bar(file) if at_terminal and _moves(file) else Lines(say or say_on_stderr) as display:
            yield display
    else:
        yield silent


def hide() -> AbstractContextManager[Display]:
    """No display."""
    return show(False)


def _moves(file: Any) -> bool:
    """Whether the terminal can write over a line."""
    from rich.console import Console

    return not Console(file=file).is_dumb_terminal


def size(num_bytes: float) -> str:
    """A number of bytes, for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:g} B"


def amount(stage: str, done: int, total: int) -> str:
    """How much of a stage is done."""
    text = size if stage in IN_BYTES else str
    return f"{text(done)} of {text(total)}" if total else ""


@dataclass
class _Stage:
    name: str
    done: int
    total: int
    since: float
    next_s: float = LONG_S  # of its age, for the next line

    def line(self, subject: str, now: float, end: str = "") -> str:
        words = [f"{subject}:" if subject else "", self.name, amount(self.name, self.done, self.total)]
        return f"{' '.join(filter(None, words))}: {now - self.since:.1f} s{end}"


class Lines:
    """For a log: when a long stage has ended, a line with its time; while it goes on, a line now and then.

    Lines come with reports: a thread that wakes by itself would slow a build down that is short of memory."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._now = say, now
        self._stages: dict[str, _Stage] = {}

    def __call__(self, stage: str, done: int, total: int, subject: str = "") -> None:
        running = self._stages.get(subject)
        if running is None or running.name != stage:
            self._end(subject)
            if stage != READY:
                self._stages[subject] = _Stage(stage, done, total, self._now())
            return
        running.done, running.total = done, total
        now = self._now()
        if now - running.since >= running.next_s:
            self._say(running.line(subject, now, " so far"))
            running.next_s = now - running.since + min(running.next_s, MAX_S)

    def _end(self, subject: str) -> None:
        stage, now = self._stages.pop(subject, None), self._now()
        if stage is not None and now - stage.since >= LONG_S:
            stage.done = stage.total  # perhaps its last reports were not seen
            self._say(stage.line(subject, now))

    def __enter__(self) -> "Lines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A stage that failed has not ended: the error says what became of it."""
        for subject in list(self._stages) if error is None else ():
            self._end(subject)


class Bar:
    """For a terminal: a line for each subject, written over as it moves, and gone at the end."""

    def __init__(self, file: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(file=file),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}  # by subject

    def __call__(self, stage: str, done: int, total: int, subject: str = "") -> None:
        if stage == READY:
            if subject in self._tasks:
                self._progress.remove_task(self._tasks.pop(subject))
            return
        if subject not in self._tasks:
            self._tasks[subject] = self._progress.add_task(stage, total=None, amount="")
        self._progress.update(
            self._tasks[subject],
            description=f"{subject}: {stage}" if subject else stage,
            completed=done,
            total=total or None,
            amount=amount(stage, done, total),
        )

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class File:
    """A Report for another process, which reads the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = path.with_name(f".{path.name}")

    def __call__(self, stage: str, done: int, total: int) -> None:
        with suppress(OSError):  # a full disk stops no engine
            self._draft.write_text(json.dumps([stage, done, total]))
            self._draft.replace(self._path)


def read_report(path: Path) -> tuple[str, int, int] | None:
    """The last report in a file; None: there is none yet."""
    try:
        stage, done, total = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return stage, done, total
