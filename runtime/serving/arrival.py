"""When a request came to a door of ours, told by the door's process to the engine's.

Latencies and time limits begin there: before the body, the chat template, the tokenizer and Triton's queue.
All processes of a machine read one clock (on Linux, time.perf_counter is CLOCK_MONOTONIC). The mark carries
a key that only `hemiola serve` and its engines know, so that no caller can date its own request.
"""

import hmac

from hemiola.runtime.errors import Refused

NAME = "hemiola-arrival"  # a request parameter over gRPC, a header over HTTP


def make_mark(key: str, seconds: float) -> str:
    return f"{key} {seconds!r}"


def read_mark(mark: object, key: str, now: float) -> float:
    """The seconds of a mark that one of our doors made."""
    given, _, seconds = str(mark).partition(" ")
    if not key or not hmac.compare_digest(given.encode(), key.encode()):
        message = f"{NAME} is set by the doors of `hemiola serve` only"
        raise Refused("unsupported", NAME, message=message, way_out="leave it out")
    return min(float(seconds), now)
