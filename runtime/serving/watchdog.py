"""An engine's process ends with its server, whatever it does: it loads, is stopped, or holds Python's lock.

The kernel's own signal for a parent's death would come too early: it is sent when the thread that forked has
ended, and tritonserver forks from threads that end once a model is loaded.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

# A process of its own, since ours may be unable to do anything. It gets file descriptors: ids can be reused.
HOLD = """
import select, signal, sys
server, engine = map(int, sys.argv[1:])
poll = select.poll()
poll.register(server, select.POLLIN)
poll.register(engine, select.POLLIN)
if engine not in dict(poll.poll()):
    signal.pidfd_send_signal(engine, signal.SIGKILL)
"""


class Watchdog:
    """A process beside this one that kills it when its server ends.

    The server is the parent, whose id stands on this process's command line: with another parent, it is gone.
    """

    def __init__(self) -> None:
        words = Path("/proc/self/cmdline").read_text().split("\0")
        self._ends = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
        if str(os.getppid()) not in words:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_lost = 0
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLD, *map(str, self._ends)],
            pass_fds=self._ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # no Ctrl-C of ours is for it
        )

    def restart_if_lost(self) -> bool:
        """Whether the watchdog was gone; then a new one is started."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        self.num_lost += 1
        return True
