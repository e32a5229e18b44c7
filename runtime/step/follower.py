"""A follower: runs the leader's steps with its own part of the weights, and decides nothing.

Started by runtime/device/followers.py, which it hears on stdin and answers on stdout, a JSON object a line.
It ends when stdin does.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import numpy as np
import torch

import hemiola
from hemiola.runtime import manifest as manifests
from hemiola.runtime.abi import widths
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.find import find_device
from hemiola.runtime.device.host_units import HostUnits
from hemiola.runtime.device.memory import Storage, free_bytes
from hemiola.runtime.device.ranks import BEAT, CALLS, LANDED, MOVED, Digest, SharedMemory, digest_of
from hemiola.runtime.device.ring import RecordReader
from hemiola.runtime.device.session import Session
from hemiola.runtime.device.transfer import fence, fetch
from hemiola.runtime.device.windows import Windows
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.outline import check_same
from hemiola.runtime.step.record import Move, StepRecord, unpacked
from hemiola.runtime.step.steps import AllSteps, make_steps

HEARTBEAT = 0.1  # seconds


def build() -> str:
    """What ranks must have in common, for a sentence."""
    return f"hemiola {hemiola.__version__} with torch {torch.__version__}, Python {sys.version.split()[0]}"


class PageReplica:
    """The leader's page table, entry by entry."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.table = np.zeros((num_slots, width), np.int32)
        self._changes: dict[int, int] = {}

    def keep_changes(self) -> None: ...

    def put(self, changes: np.ndarray) -> None:
        self.table.reshape(-1)[changes[:, 0]] = changes[:, 1]
        self._changes.update(changes.tolist())

    def take_changes(self) -> dict[int, int]:
        """For a copy on a device."""
        changes, self._changes = self._changes, {}
        return changes


class Replica:
    """An engine's part that repeats steps."""

    def __init__(
        self, steps: AllSteps, storage: Storage, pages: PageReplica, units: HostUnits | None
    ) -> None:
        self.steps, self._storage, self._pages, self._units = steps, storage, pages, units
        self._rules: dict[int, Rule] = {}  # by slot
        self.on_cpu = storage.device.type == "cpu"

    def run(self, record: StepRecord) -> Callable[[], Digest] | None:
        """One step, in the leader's order. What is returned waits for its end, and says what the ledger holds
        then."""
        self._pages.put(record.changes)
        for opening in record.openings:
            if opening.restore_from:
                self._storage.copy_slot(opening.restore_from, opening.slot_id)
            self._rules[opening.slot_id] = opening.rule
            self.steps.open(opening.slot_id, opening.ids, opening.start, opening.rule)
        self.steps.repeat(record.ready, record.fitted, lambda: record.plan(self._rules))
        if not record.is_checked:
            return None
        ledger = self.steps.ledger
        (digest,) = fetch([digest_of(ledger.ids, ledger.lengths, record.slot_ids)])
        passed = fence(ledger.device)

        def told() -> Digest:
            passed()
            return Digest(record.number, int(digest))

        return told

    def move(self, move: Move) -> Callable[[], None]:
        """To or from the host's units. Returns a function that waits until it is done."""
        assert self._units is not None
        getattr(self._units, move.method)(*move.args)
        return self._units.settled()


def main() -> None:
    heard, said = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    line = heard.readline()
    if not line:
        sys.exit("error: a follower is started by the process that opens an engine of several ranks")
    job = json.loads(line)
    rank = job["rank"]
    try:
        memory = SharedMemory(job["memory"], job["size"], job["token"])
        calls: list[Callable[[], int]] = []
        threading.Thread(target=_beat, args=(memory.of(rank), calls), daemon=True).start()
        replica = _open(Path(job["engine_dir"]), memory, rank, heard, said)
    except Refused as error:
        _say(said, refused=str(error))
        return
    except Exception as error:
        _say(said, failed=_words(error))
        raise
    threading.Thread(target=_end_with, args=(heard, job["leader"]), daemon=True).start()
    if replica.on_cpu:
        from hemiola.plugins.cpu.steps import num_calls  # numba is not needed elsewhere

        calls.append(num_calls)
    _say(said, ready=True)
    try:
        reader = RecordReader(memory, rank, job["bell"])
        follow(replica, memory, rank, reader, lambda error: _say(said, failed=_words(error)))
    except Exception as error:
        if not memory.is_stopped:
            _say(said, failed=_words(error))
            raise


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def follow(
    replica: Replica, memory: SharedMemory, rank: int, reader: RecordReader, tell: Callable[[Exception], None]
) -> None:
    """The leader's steps, until something ends this process. tell: gets what fails beside them."""
    moves: SimpleQueue[Callable[[], None]] = SimpleQueue()
    digests: SimpleQueue[Callable[[], None]] = SimpleQueue()
    for things, done in ((moves, partial(_count, memory.of(rank))), (digests, lambda: None)):
        threading.Thread(target=_wait_for, args=(things, done, tell), daemon=True).start()
    while True:
        record = unpacked(reader.read())
        if isinstance(record, Move):
            moves.put(replica.move(record))
            continue
        told = replica.run(record)
        if told is not None:
            digests.put(partial(_post, memory, rank, told))
        memory.of(rank)[LANDED] = record.number


def _post(memory: SharedMemory, rank: int, told: Callable[[], Digest]) -> None:
    memory.post(rank, told())


def _count(counters: np.ndarray) -> None:
    counters[MOVED] += 1


def _wait_for(
    things: "SimpleQueue[Callable[[], None]]", done: Callable[[], None], tell: Callable[[Exception], None]
) -> None:
    """Of a GPU, which goes on beside the steps that follow. What fails ends all."""
    try:
        while True:
            things.get()()
            done()
    except Exception as error:
        tell(error)
        traceback.print_exc()
        os._exit(1)


def _open(engine_dir: Path, memory: SharedMemory, rank: int, heard: TextIO, said: TextIO) -> Replica:
    """Raises Refused."""
    manifest = manifests.load(engine_dir)
    device = find_device(engine_dir, manifest.arch)
    files = [engine_dir / file for file in manifest.weights_files(rank)]
    free = free_bytes(device, files, manifest.drawn_bytes, manifest.work_bytes)
    _say(said, free=free, identity=manifest.identity, build=build())
    told = json.loads(heard.readline() or "{}")
    if not told:
        sys.exit(0)  # the leader opens no engine
    torch.set_num_threads(told["threads"])
    config = Resolved(**told["config"])
    group = memory.group(rank) if device.type == "cpu" else _joined(memory, rank, device, heard, said)
    storage = Storage(manifest.states, config.num_pages, config.num_slots, device=device)
    session = Session(engine_dir, manifest, storage, config.drafts, group=group)
    check_same(engine_dir, manifest.identity)
    pages = PageReplica(config.num_slots, widths(config, "trunk")["W"])
    steps = make_steps(config, storage, session, pages, device, ExitStack())
    num_bytes = config.host_cache_bytes
    units = storage.host_units(num_bytes, memory.share(rank)) if num_bytes else None
    return Replica(steps, storage, pages, units)


def _joined(
    memory: SharedMemory, rank: int, device: torch.device, heard: TextIO, said: TextIO
) -> torch.Tensor:
    """The group of a rank with a GPU; its windows stay until the process ends."""
    windows = Windows(memory, rank, device)
    _say(said, window=windows.handle.hex())
    told = json.loads(heard.readline() or "{}")
    if not told:
        sys.exit(0)
    return windows.open([bytes.fromhex(handle) for handle in told["windows"]])


def _say(said: TextIO, **message: Any) -> None:
    try:
        said.write(json.dumps(message) + "\n")
        said.flush()
    except BrokenPipeError:  # the leader has refused the engine, and said why
        os._exit(0)


def _end_with(heard: TextIO, leader: int) -> None:
    """The leader closes its end, or is gone and its children are not ours."""
    threading.Thread(target=_end_without, args=(leader,), daemon=True).start()
    heard.read()
    os._exit(0)


def _end_without(leader: int) -> None:
    """A child of the leader's may still hold the pipe."""
    while os.getppid() == leader:
        time.sleep(1)
    os._exit(0)


def _beat(counters: np.ndarray, calls: list[Callable[[], int]]) -> None:
    """calls: who counts kernels, once there is one."""
    while True:
        counters[BEAT] += 1
        counters[CALLS] = sum(count() for count in calls)
        time.sleep(HEARTBEAT)


if __name__ == "__main__":
    main()
