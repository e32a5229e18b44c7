"""A follower that goes wrong in its fifth step, or its first move, in a way that its first argument names."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from hemiola.runtime.device.ranks import Digest
from hemiola.runtime.step import follower
from hemiola.runtime.step.record import Move, StepRecord


def _fail(*given: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class BadReplica(follower.Replica):
    def run(self, record: StepRecord) -> Callable[[], Digest] | None:
        if record.number == 5:
            match sys.argv[1]:
                case "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hangs":
                    time.sleep(1000)
                case "raises":
                    raise ValueError("a page that is none")
                case "differs":
                    self.steps.ledger.ids[record.slot_ids[0], -1] = 7
                case "raises behind a step":  # as a GPU's error comes
                    super().run(record)
                    return _fail
        return super().run(record)

    def move(self, move: Move) -> Callable[[], None]:
        if sys.argv[1] == "dies moving":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "moves late":
            time.sleep(0.03)
        return super().move(move)


if __name__ == "__main__":
    if sys.argv[1] == "other build":
        follower.build = lambda: "hemiola 0.0 with torch 1.0"
    if sys.argv[1] == "no memory":
        follower.free_bytes = lambda *given: 1000
    if sys.argv[1] == "stops opening":
        follower.free_bytes = lambda *given: os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "hangs opening":
        follower.free_bytes = lambda *given: time.sleep(1000)
    if sys.argv[1] == "raises opening":
        follower.free_bytes = _fail
    follower.Replica = BadReplica  # type: ignore[misc]
    follower.main()
