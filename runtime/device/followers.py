"""The leader's followers: processes that it starts, looks after, and takes along when it ends."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hemiola.runtime.arch import VISIBLE, visible_from
from hemiola.runtime.device.host_units import Share
from hemiola.runtime.device.ranks import BEAT, LANDED, MOVED, Digest, SharedMemory
from hemiola.runtime.device.ring import NAP, RecordWriter
from hemiola.runtime.device.windows import Windows
from hemiola.runtime.errors import RankLost, Refused
from hemiola.runtime.processes import environment

COMMAND = [sys.executable, "-P", "-m", "hemiola.runtime.step.follower"]
TICK = 0.1  # seconds between two looks at the followers
SILENT = 10.0  # seconds without a heartbeat, while the leader has a core: a process that was stopped
STUCK = 60.0  # seconds of a step in which no rank calls a kernel or meets the others
OPENING_SILENT = 60.0  # the same while an engine opens: a process may be busy with libraries and drivers
OPENING = 3600.0  # seconds in which ranks open
ENDING = 5.0  # seconds in which a follower ends when it is told to
log = logging.getLogger("hemiola")


class _Follower(NamedTuple):
    rank: int
    process: "subprocess.Popen[str]"
    bell: int


class _Silence:
    """For how long followers have not moved."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # by rank: its last heartbeat, and for how long it is that

    def tick(self) -> float:
        """Seconds since the last call; if we were stopped, too, it is nobody's fault."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * TICK), now
        return passed

    def of(self, rank: int, beat: int, passed: float) -> float:
        """Seconds, after so many more have passed."""
        last, since = self._seen.get(rank, (0, 0.0))
        self._seen[rank] = beat, since + passed if last == beat else 0.0
        return self._seen[rank][1]


class FollowerProcesses:
    """One for each rank but the first. `opened` and `ready` are the two halves of starting them."""

    def __init__(self, engine_dir: Path, size: int, identity: str, build: str, on_gpus: bool = False) -> None:
        """on_gpus: each has one of its own, and sees it as the first."""
        self.memory = SharedMemory.make(size)
        self.windows: Windows | None = None  # the leader's, closed with this
        self._on_gpus = on_gpus
        self._on_lost: Callable[[RankLost], None] = lambda error: None
        self._identity, self._build = identity, build
        self._followers: list[_Follower] = []
        self._lock = threading.Lock()
        self._reason = ""
        self._launched = self._done = 0  # numbers of steps
        self._num_moves = 0
        self._digests: dict[int, int] = {}  # the leader's own, by step
        self._opened, self._closing, self._closed = threading.Event(), threading.Event(), False
        self._watches: list[threading.Thread] = []
        try:
            for rank in range(1, size):
                self._followers.append(self._start(engine_dir, rank))
        except BaseException:
            self.close()
            raise
        self._ring = RecordWriter(self.memory, [one.bell for one in self._followers], self.check)
        self._begin(self._guard, "hemiola-opening")

    def _begin(self, watch: Callable[[], None], name: str) -> None:
        self._watches.append(threading.Thread(target=watch, name=name, daemon=True))
        self._watches[-1].start()

    def _start(self, engine_dir: Path, rank: int) -> _Follower:
        """It inherits the memory and its bell, and ends when its stdin does."""
        bell = os.eventfd(0)
        variables = environment()
        if self._on_gpus:
            variables[VISIBLE] = visible_from(rank)
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.memory.fd, bell),
            env=variables,
            process_group=0,  # Ctrl-C is the leader's to handle
            text=True,
        )
        follower = _Follower(rank, process, bell)
        job = {"rank": rank, "size": self.memory.size, "bell": bell, "leader": os.getpid()}
        job |= {"memory": self.memory.fd, "token": self.memory.token}
        self._tell(follower, job | {"engine_dir": str(engine_dir.resolve())})
        return follower

    def opened(self) -> int:
        """Each has read the manifest and looked at its memory: the least that one has free, in bytes."""
        free = []
        for one in self._followers:
            message = self._hear(one)
            if message["identity"] != self._identity:
                reason = f"rank {one.rank} has found another engine than the leader, built meanwhile"
                raise Refused("conflict", "engine_dir", message=reason, way_out="open it again")
            if message["build"] != self._build:
                reason = f"rank {one.rank} runs {message['build']}, the leader {self._build}"
                raise Refused("conflict", message=reason, way_out="start the server again")
            free.append(message["free"])
        return min(free)

    def configure(self, config: dict[str, Any], threads: int) -> None:
        """With these sizes."""
        self.memory.grow(config["host_cache_bytes"])
        for one in self._followers:
            self._tell(one, {"config": config, "threads": threads})

    def exchange(self, handle: bytes) -> list[bytes]:
        """Handles of all ranks' windows, of which this is the leader's; each follower gets them, too."""
        handles = [handle, *(bytes.fromhex(self._hear(one)["window"]) for one in self._followers)]
        for one in self._followers:
            self._tell(one, {"windows": [known.hex() for known in handles]})
        return handles

    def _guard(self) -> None:
        """While ranks open, and GPUs run their first steps: nobody waits for one that has ended or hangs."""
        silence, passed = _Silence(), 0.0
        while not self._opened.wait(TICK) and not self._closing.is_set():
            passed += (tick := silence.tick())
            for one in self._followers:
                if one.process.poll() is not None:
                    self.memory.stop()
                    return
                if silence.of(one.rank, int(self.memory.of(one.rank)[BEAT]), tick) > OPENING_SILENT:
                    self._lose(f"rank {one.rank} has not moved for {OPENING_SILENT:g} seconds of opening")
                    return
            if passed > OPENING:
                self._lose(f"the ranks have not opened in {OPENING:g} seconds")
                return

    def ready(self, on_lost: Callable[[RankLost], None]) -> None:
        """All have loaded their weights; from here on they are watched. on_lost: is called by a thread of
        its own, or by who sends a step."""
        self._on_lost = on_lost
        for one in self._followers:
            self._hear(one)
        self._opened.set()
        self._begin(self._look_after, "hemiola-ranks")

    def _tell(self, one: _Follower, message: dict[str, Any]) -> None:
        assert one.process.stdin is not None
        with suppress(BrokenPipeError):  # it is heard of at once
            one.process.stdin.write(json.dumps(message) + "\n")
            one.process.stdin.flush()

    def _hear(self, one: _Follower) -> dict[str, Any]:
        """What it says. Raises what it has refused, and RankLost if it has ended."""
        assert one.process.stdout is not None
        line = one.process.stdout.readline()
        if not line:
            raise RankLost(
                self._reason or f"rank {one.rank} {_ended(one.process)} while the engine was opened"
            )
        message = json.loads(line)
        if "failed" in message:
            reason = f"rank {one.rank} failed while the engine was opened ({message['failed']})"
            raise RankLost(self._reason or reason)
        if "refused" in message:
            raise Refused("other", message=f"rank {one.rank}: {message['refused']}")
        return message

    # Steps.

    def send(self, number: int, record: bytes) -> None:
        """A step to all followers. Raises RankLost when one is lost."""
        self.check()
        self._launched = number
        self._ring.write(record)

    def move(self, record: bytes) -> None:
        """To or from the host's units. Raises RankLost when one is lost."""
        self.check()
        self._num_moves += 1
        self._ring.write(record)

    def settled(self) -> Callable[[], None]:
        """A function that waits until all have done the moves so far. Raises RankLost when one is lost."""
        number = self._num_moves

        def wait() -> None:
            while min(int(self.memory.of(one.rank)[MOVED]) for one in self._followers) < number:
                if self.memory.is_stopped:
                    raise RankLost(self._reason)
                time.sleep(NAP)

        return wait

    def share(self) -> Share:
        """The leader's part of the host's units."""
        return self.memory.share(0)

    def landed(self, number: int, digest: Digest | None) -> None:
        """The leader has done a step; digest: of its ledger, with which the followers' are compared."""
        if digest is not None:
            self._digests[digest.number] = digest.value
        self._done = number
        self.check()

    def check(self) -> None:
        """Raises RankLost when a follower is lost."""
        self._compare()
        if self._reason:
            raise RankLost(self._reason)

    def _compare(self) -> None:
        """Digests of steps that leader and follower have both done."""
        for one in self._followers:
            for number, value in self.memory.digests(one.rank):
                expected = self._digests.get(number)
                if expected is not None and expected != value:
                    self._lose(f"rank {one.rank} differs from the leader behind step {number}: its ledger")
        seen = min((int(self.memory.of(one.rank)[LANDED]) for one in self._followers), default=0)
        for number in [number for number in [*self._digests] if number < seen - 1000]:
            self._digests.pop(number, None)

    # Watching.

    def _look_after(self) -> None:
        silence = _Silence()
        moves, stuck = (self._done, *self.memory.moves()), 0.0
        while not self._closing.wait(TICK):
            passed = silence.tick()
            for one in self._followers:
                if one.process.poll() is not None:
                    self._lose(f"rank {one.rank} {_ended(one.process)}{_last_words(one.process)}")
                    return
                if silence.of(one.rank, int(self.memory.of(one.rank)[BEAT]), passed) > SILENT:
                    self._lose(f"rank {one.rank} has not moved for {SILENT:g} seconds")
                    return
            moves_now = (self._done, *self.memory.moves())
            stuck = stuck + passed if moves_now == moves and self._is_busy else 0.0
            moves = moves_now
            if stuck > STUCK:
                self._lose(f"no rank has moved in step {self._launched} for {STUCK:g} seconds")
                return
            self._compare()
            if self._reason:
                return

    @property
    def _is_busy(self) -> bool:
        landed = [int(self.memory.of(one.rank)[LANDED]) for one in self._followers]
        return min([self._done, *landed]) < self._launched

    def _lose(self, reason: str) -> None:
        """The first reason counts. Nobody waits any longer, and no follower lives on."""
        with self._lock:
            if self._reason or self._closing.is_set():
                return
            self._reason = reason
        log.error("the engine is lost: %s", reason)
        self.memory.stop()
        self._kill()
        self._on_lost(RankLost(reason))

    def _kill(self) -> None:
        for one in self._followers:
            with suppress(ProcessLookupError):
                one.process.kill()
            one.process.wait()

    def close(self) -> None:
        """End them; those that do not, by force. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self.memory.stop()
        for one in self._followers:
            assert one.process.stdin is not None and one.process.stdout is not None
            with suppress(BrokenPipeError):
                one.process.stdin.close()
        for one in self._followers:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(ENDING)
        self._kill()
        for one in self._followers:
            assert one.process.stdout is not None
            one.process.stdout.close()
            os.close(one.bell)
        self._followers = []
        for watch in self._watches:
            if watch is not threading.current_thread():
                watch.join()
        if self.windows is not None:
            self.windows.close()
        self.memory.close()


def _last_words(process: "subprocess.Popen[str]") -> str:
    """What failed, where it could say so."""
    assert process.stdout is not None
    said = [json.loads(line) for line in process.stdout]
    return "".join(f" ({one['failed']})" for one in said if "failed" in one)


def _ended(process: "subprocess.Popen[str]") -> str:
    """How a process did."""
    status = process.wait()
    if status >= 0:
        return f"has ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
