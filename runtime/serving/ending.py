"""A server that shuts down refuses new requests: the message of every door, and how engines learn of it.

Callers of gRPC keep their connections, which tritonserver serves until it is gone: there the engine refuses.
"""

import contextlib
from pathlib import Path

REASON = "the server is shutting down; send the request to another server, or again later"
FILE = "~ends"  # beside the heartbeats; no model's name begins so


def begin(beats: Path) -> None:
    """For the models whose heartbeats stand there."""
    with contextlib.suppress(OSError):
        (beats / FILE).touch()


def begun(heartbeat: Path) -> bool:
    """Whether the server of the model that writes this file has begun to end."""
    return heartbeat.with_name(FILE).exists()
