"""What operators read. Who writes it neither waits nor fails, whatever became of the disk or the reader."""

import logging
import os
import queue
import re
import subprocess
import threading
from collections import deque

from hemiola.runtime.errors import counted

# An error, wherever there is no GPU; and a warning for each connection to a socket of ours.
HARMLESS = re.compile("CudaDriverHelper has not been initialized|NODELAY NOT SUPPORTED")
# Not for operators; the last is gRPC's, whose port the launcher closes before the server does (listener.py).
QUIET = r"[IW]\d{4} |Signal \(|E\d{4} .* Failed accept4: Invalid argument"
REQUEST = r"request ['\"].*['\"]: \w+, \d+ tokens in"  # a line of --log-requests (stream.py)
MOST_LINES = 10_000  # that wait for a slow reader; more are lost, and counted
FLUSH_S = 1.0
STDOUT, STDERR = 1, 2


def say(text: str, file: int = STDOUT) -> None:
    """A line. Not by `print`, which keeps what it could not write and tries again at exit."""
    _write(file, f"{text}\n")


def _write(file: int, text: str) -> bool:
    rest = text.encode(errors="replace")
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
        return True
    except OSError:  # the disk is full, or nobody reads
        return False


def _gap(num_lost: int) -> str:
    return f"{counted(num_lost, 'line of this log is', 'lines of this log are')} lost\n"


class Printer:
    """A file that a thread of its own writes."""

    def __init__(self, file: int = STDERR) -> None:
        self._file = file
        self._texts: queue.Queue[str | threading.Event] = queue.Queue(MOST_LINES)
        self._num_lost = 0
        self._lock = threading.Lock()  # of that number
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def say(self, text: str) -> None:
        """A line, or several; with their ends."""
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self._lose(1)

    def flush(self) -> None:
        """All that was said is written, or it takes too long."""
        done = threading.Event()
        try:
            self._texts.put(done, timeout=FLUSH_S)
        except queue.Full:
            return
        done.wait(FLUSH_S)

    def _run(self) -> None:
        while True:
            text = self._texts.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            num_lost = self._num_lost
            if num_lost and _write(self._file, _gap(num_lost)):
                self._lose(-num_lost)
            if not _write(self._file, text):
                self._lose(1)

    def _lose(self, num_lines: int) -> None:
        with self._lock:
            self._num_lost += num_lines


class Handler(logging.Handler):
    """Python's own log, by a printer."""

    def __init__(self, printer: Printer) -> None:
        super().__init__()
        self._printer = printer

    def emit(self, record: logging.LogRecord) -> None:
        self._printer.say(f"{self.format(record)}\n")


class Log:
    """The server's output, read in a thread: errors are passed on once it is ready, all of it if verbose."""

    def __init__(
        self, process: "subprocess.Popen[str]", printer: Printer, verbose: bool, ready: bool = False
    ) -> None:
        self.ready = ready
        self._lines: deque[str] = deque(maxlen=200)
        self._process = process
        self._printer = printer
        self._verbose = verbose
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            is_for_operators = not (re.match(QUIET, line) or HARMLESS.search(line))
            if self._verbose or (self.ready and is_for_operators):
                self._printer.say(line)

    def reason(self, wait_s: float = 0.0) -> str:
        """Why it did not start: what a model said, else the last error, else the last line.

        Of one that has ended, all is read first, if that takes no longer.
        """
        self.thread.join(wait_s)
        lines = [line for line in self._lines if not (HARMLESS.search(line) or re.match(REQUEST, line))]
        text = "".join(lines)
        model = r"failed to load '(.*?)' version 1: (?:Internal: TritonModelException: )?(.*?)(?:\\n|\"?\n)"
        reasons = [": ".join(parts) for parts in re.findall(model, text)]
        reasons = reasons or re.findall(r"^E\d{4} .*?\] (.*)", text, re.MULTILINE)
        reasons = reasons or re.findall(r"^(?:[IW]\d{4} .*?\] )?(.+)", text, re.MULTILINE)
        return reasons[-1] if reasons else "it said nothing"
