"""A server and an engine of two lines each; test_faults.py has the real ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.served import until

ENGINE = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from hemiola.runtime.serving.watchdog import Watchdog
if sys.argv[1] == "late":
    sys.stdin.read()
watchdog = Watchdog()
assert not watchdog.restart_if_lost()
if sys.argv[1] == "cut":
    for held in Path("/proc/self/task").glob("*/children"):
        os.kill(int(held.read_text()), signal.SIGKILL)
    while not watchdog.restart_if_lost():
        time.sleep(0.01)
    assert watchdog.num_lost == 1 and not watchdog.restart_if_lost()
print("tied", flush=True)
(ctypes.PyDLL(None) if sys.argv[1] == "lock" else time).sleep(600)
"""
# As tritonserver does: from a thread that ends, and telling the engine who its server is.
SERVER = """
import os, subprocess, sys, threading
def fork():
    engine = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid())])
    print(engine.pid, flush=True)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
os.read(0, 1) if sys.argv[2] != "late" else threading.Event().wait()
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("how", ["idle", "lock", "stopped", "late", "cut"])
def test_an_engine_outlives_its_server(how: str) -> None:
    """lock: as a call for metrics does, PyDLL's sleep holds Python's lock. late: the server died before.
    cut: the process that guards it is killed first."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER, ENGINE, how], text=True, **pipe) as server:
        engine = int(server.stdout.readline())
        try:
            if how != "late":
                assert server.stdout.readline() == "tied\n"
            if how == "stopped":
                os.kill(engine, signal.SIGSTOP)
            with pytest.raises(AssertionError, match="did not happen"):
                until(lambda: ended(engine), 0.5)  # the thread that forked it has ended, its server has not
            server.kill()
            server.wait()
            server.stdin.close()
            until(lambda: ended(engine))
            assert server.stdout.read() == ""
        finally:
            os.kill(engine, signal.SIGKILL) if not ended(engine) else None
