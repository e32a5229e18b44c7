"""Ranks as threads of this process: what they exchange lies in one tensor, and records go by queues."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from kit.harness import Harness, Request

from hemiola.plugins.ranks import LINE, make_group, window_bytes
from hemiola.runtime import manifest as manifests
from hemiola.runtime.abi import widths
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.host_units import Share
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.ranks import Digest
from hemiola.runtime.device.session import Computed, Session
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.step.follower import PageReplica, Replica
from hemiola.runtime.step.record import Move, StepRecord, unpacked
from hemiola.runtime.step.steps import make_steps

T = TypeVar("T")
ROOM = 2**14  # small, so that messages go in pieces


class Windows:
    """What ranks exchange by, as long as this is kept."""

    def __init__(self, size: int, room: int = ROOM) -> None:
        width = window_bytes(room)
        self._memory = torch.zeros(2 * LINE + size * width, dtype=torch.uint8)
        stop = self._memory.data_ptr() + -self._memory.data_ptr() % LINE
        windows = [stop + LINE + rank * width for rank in range(size)]
        self.groups = [make_group(rank, windows, room, stop) for rank in range(size)]


@contextmanager
def groups(size: int, room: int = ROOM) -> Iterator[list[torch.Tensor]]:
    """Each rank's group; buffers of `room` bytes."""
    windows = Windows(size, room)
    yield windows.groups


def at_once(found: Sequence[object], run: Callable[..., T]) -> list[T]:
    """run(rank, found[rank]) on all ranks, each in its thread."""
    with ThreadPoolExecutor(len(found)) as pool:
        return [*pool.map(run, range(len(found)), found)]


class RankHarness:
    """A harness of each rank, called together; logits are those of all."""

    def __init__(self, engine_dir: Path) -> None:
        found = manifests.load(engine_dir)
        self._windows = Windows(found.tp)
        self._ranks = [Harness(engine_dir, group) for group in self._windows.groups]
        self.manifest, self.device = found, self._ranks[0].device

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """Of the first rank."""
        return self._ranks[0].states

    @property
    def hidden(self) -> torch.Tensor:
        return self._ranks[0].hidden

    def forget(self) -> None:
        for own in self._ranks:
            own.forget()

    def request(self) -> Request:
        made = [own.request() for own in self._ranks]
        return made[0]

    def step(self, rows: list[tuple[Request, list[int], int]]) -> list[torch.Tensor]:
        def run(rank: int, own: Harness) -> list[torch.Tensor]:
            return own.step([(self._of(rank, request), *rest) for request, *rest in rows])

        return [torch.cat(parts, 1) for parts in zip(*at_once(self._ranks, run), strict=True)]

    def draft(self, request: Request, tokens: Sequence[int], hidden: torch.Tensor, first: int) -> Computed:
        def run(rank: int, own: Harness) -> Computed:
            return own.draft(self._of(rank, request), tokens, hidden, first)

        found = at_once(self._ranks, run)
        return Computed(torch.cat([one.logits for one in found], 1), found[0].hidden)

    def _of(self, rank: int, request: Request) -> Request:
        return self._ranks[rank].requests[request.slot - 1]


class RankThreads:
    """Followers of a loop that is run by hand. Ledgers are compared after every step that asks for it."""

    def __init__(self, engine_dir: Path, manifest: Manifest, config: Resolved) -> None:
        self._windows = Windows(manifest.tp)
        self.groups = self._windows.groups
        self.num_compared = self.num_moves = 0
        self._size = manifest.tp
        self._memory = mmap.mmap(-1, max(1, config.host_cache_bytes))
        ranks = range(1, manifest.tp)
        self._replicas = [self._replica(engine_dir, manifest, config, rank) for rank in ranks]
        self._pools = [ThreadPoolExecutor(1) for _ in self._replicas]
        self._under_way: list[Future[Digest | None]] = []
        self._moves: list[Future[None]] = []

    def _replica(self, engine_dir: Path, manifest: Manifest, config: Resolved, rank: int) -> Replica:
        storage = Storage(manifest.states, config.num_pages, config.num_slots, poison=True)
        session = Session(engine_dir, manifest, storage, config.drafts, group=self.groups[rank])
        pages = PageReplica(config.num_slots, widths(config, "trunk")["W"])
        steps = make_steps(config, storage, session, pages, torch.device("cpu"), ExitStack())
        num_bytes = config.host_cache_bytes
        units = storage.host_units(num_bytes, self._share(rank)) if num_bytes else None
        return Replica(steps, storage, pages, units)

    def _share(self, rank: int) -> Share:
        return Share(rank, self._size, lambda num_bytes: memoryview(self._memory)[:num_bytes])  # type: ignore

    def share(self) -> Share:
        return self._share(0)

    def _submit(self, run: Callable[[Replica], T]) -> list[Future[T]]:
        return [pool.submit(run, own) for pool, own in zip(self._pools, self._replicas, strict=True)]

    def send(self, number: int, record: bytes) -> None:
        def run(replica: Replica) -> Digest | None:
            told = replica.run(cast(StepRecord, unpacked(record)))
            return told and told()

        self._under_way = self._submit(run)

    def move(self, record: bytes) -> None:
        self.num_moves += 1
        self._moves += self._submit(lambda replica: replica.move(cast(Move, unpacked(record)))())

    def settled(self) -> Callable[[], None]:
        futures = [*self._moves]
        return partial(_wait_for, futures)

    def landed(self, number: int, digest: Digest | None) -> None:
        """A follower's own error is raised here."""
        while self._moves:
            self._moves.pop().result()
        for future in self._under_way:
            assert future.result() == digest, f"a follower differs behind step {number}"
            self.num_compared += digest is not None

    def check(self) -> None: ...


def _wait_for(futures: Sequence["Future[None]"]) -> None:
    for future in futures:
        future.result()
