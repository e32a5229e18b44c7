"""A question to our own tritonserver, which listens on files."""

import contextlib
import http.client
import socket
from pathlib import Path


class _Local(http.client.HTTPConnection):
    """To a server that listens on a file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=1)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def answers(path: Path, url: str) -> bool:
    """Whether the server behind this socket answers 200."""
    with (
        contextlib.closing(_Local(path)) as connection,
        contextlib.suppress(OSError, http.client.HTTPException),
    ):
        connection.request("GET", url, headers={"Connection": "close"})
        return connection.getresponse().status == 200
    return False
