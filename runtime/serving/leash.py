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


def end_with_server() -> None:
    """From now on this process is killed when its server ends.

    That is its parent, which told it its id on the command line: if it has another, the server is gone.
    """
    told = Path("/proc/self/cmdline").read_text().split("\0")
    ends = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
    if str(os.getppid()) not in told:
        os.kill(os.getpid(), signal.SIGKILL)
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLD, *map(str, ends)],
        pass_fds=ends,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # no Ctrl-C of ours is for it
    )
    for end in ends:
        os.close(end)
