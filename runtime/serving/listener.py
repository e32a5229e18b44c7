"""Another process's listening socket, closed to new connections while those that it has go on."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

PIDFD_GETFD = 438  # of every architecture; Linux 5.6 has it


def refuse_connections(pid: int, port: int) -> bool:
    """Whether it was done: this process of ours listens on the port no more. Some containers forbid it."""
    done = False
    with contextlib.suppress(OSError):  # it has ended, or we may not
        holder = os.pidfd_open(pid)
        try:
            for listener in _sockets(pid, holder):
                with listener:
                    if _listens_on(listener, port):
                        listener.shutdown(socket.SHUT_RDWR)
                        done = True
        finally:
            os.close(holder)
    return done


def _sockets(pid: int, holder: int) -> Iterator[socket.socket]:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # one that it closes meanwhile
            if os.readlink(Path(f"/proc/{pid}/fd", name)).startswith("socket:"):
                copy = libc.syscall(PIDFD_GETFD, holder, int(name), 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                yield socket.socket(fileno=copy)


def _listens_on(listener: socket.socket, port: int) -> bool:
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return (
        listener.getsockname()[1] == port
        and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    )
