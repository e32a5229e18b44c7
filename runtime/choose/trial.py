"""A process that compiles each grammar first, within limits of time, memory and stack.

The grammar library bounds most of its work, but not all: the states of `{"multipleOf": 99999991}` take
gigabytes and never end, and a chain of 3,000 rules overflows the stack. Nothing can stop a thread that
compiles, so what does not come through here never begins in the process that serves.
"""

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from hemiola.runtime.errors import Busy
from hemiola.runtime.processes import environment, only_here

PROGRAM = "hemiola.runtime.choose.trial_process"
NOT_BY_GRAMMARS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM}  # how the process may also end


class TrialLimits(NamedTuple):
    """What compiling one grammar may take."""

    seconds: float = 5.0  # of a processor: other work on the machine makes no grammar dear
    num_bytes: int = 2**29


class Trial:
    """Starts its process when it is needed, and again if a grammar has ended it. For one thread at a time.

    The process ends with this object, or when it is closed. If this process is killed, the other reads the
    end of its stdin. (The kernel's signal for a parent's death is for the death of the thread that forked.)
    """

    def __init__(self, tokenizer: str, vocab_size: int, limits: TrialLimits) -> None:
        self._first_line = json.dumps([tokenizer, vocab_size, *limits]).encode() + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process, and closes its pipes
        self._lock = Lock()
        self._is_closed = False

    def passes(self, asked: str) -> bool:
        """Whether a grammar, as one line of JSON, was compiled within the limits, or found to be wrong.

        Raises Busy if something else ended the process, or kept it from a processor.
        """
        with self._lock:
            if self._is_closed:
                return False
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = self._start()
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        with suppress(BrokenPipeError):
            pipe_in.write(asked.encode() + b"\n")
            pipe_in.flush()
        if pipe_out.readline():
            return True
        ended = self._process.wait()
        if ended in NOT_BY_GRAMMARS and not self._is_closed:
            raise Busy("the process that compiles grammars first was ended; try again in 1 s")
        return False

    def close(self) -> None:
        """End the process, whatever it does, from any thread; after that no grammar passes."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:  # the thread that reads its pipes closes them
                self._process.kill()
                self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, only_here(_end), process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._first_line)
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()
