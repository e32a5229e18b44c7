"""The tier below the host's memory: a file that outlives the process.

The file is units of a header and one page's content each. A unit's header says whose content it is (the
form, the key, the tokens and what is before them, a snapshot's part) and has the content's sha256, so a unit
that is half written, torn by a kill, foreign or damaged is never used. The index is made of the headers when
the file is opened.

A thread does what is asked, in order: so a unit is read before it is written again. The tier's index is the
scheduler's thread's: the other thread calls `wake`, and `collect` makes known there what has been done.

A disk may hang. Nobody waits for a read longer than LIMIT_S; when nothing has moved for so long, the tier is
switched off. The host's units that a hanging thread may still read or write are lent until it returns.
"""

import hashlib
import json
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hemiola.runtime.cache.disk_file import MAGIC, header_bytes, open_file, parsed, to_bytes, to_text
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.cache.rate import Rate
from hemiola.runtime.cache.tier import Tier, TierUse, path_to
from hemiola.runtime.cache.tree import Chain, Entry, digest
from hemiola.runtime.cache.worker import Worker

log = logging.getLogger("hemiola")
MOST_WAITING = 256  # units that wait to be written; more are not kept
ERASED_AT_ONCE = 1024  # units: a file may have millions
READERS = 8  # threads: sha256 of a page takes longer than its read
PATIENCE_S = 0.05  # by which a read may take longer than computing, since it leaves the engine to others
RETRY = 32  # of so many reads and writes that are not worth it one is done: the disk may be faster by now
LIMIT_S = 10.0  # for which a request waits for a read, and without which a disk that does not move is off


class Content(Protocol):
    """The host's units, as bytes."""

    unit_bytes: int

    def get(self, unit: int) -> memoryview | bytes: ...

    def fill(self, unit: int, read: Callable[[memoryview], bool]) -> bool:
        """Let `read` write to a unit; returns what it returns."""
        ...

    def settled(self) -> Callable[[], None]:
        """A function that waits until all copies to and from units that were begun so far are done."""
        ...


@dataclass(slots=True)
class _Pieces:
    """A Mover that keeps in mind what was asked of it."""

    num_units: int
    units_per_slot: int
    host: Tier
    pages: list[tuple[int, int]] = field(default_factory=list)  # unit of the host, unit of the file
    state: list[tuple[int, int]] = field(default_factory=list)

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None:
        self.pages = list(zip(page_ids, units, strict=True))

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None:
        self.state = list(zip(self.host.states[slot_id], units, strict=True))

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None:
        raise NotImplementedError("a file's units are read by `fetch`")

    def load_slot(self, units: Sequence[int], slot_id: int) -> None:
        raise NotImplementedError("a file's units are read by `fetch`")

    def mark(self) -> int:
        raise NotImplementedError("a file's units are read by `fetch`")

    def has_come(self, number: int) -> bool:
        raise NotImplementedError("a file's units are read by `fetch`")

    def hold(self, number: int) -> None:
        raise NotImplementedError("a file's units are read by `fetch`")


@dataclass(eq=False, slots=True)
class _Job:
    """What the thread is to do. pieces: unit of the host, unit of the file, header."""

    last: Entry | None  # of the file's
    age: int  # of the index: behind a flush nothing is adopted
    writes: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    reads: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    erased: Sequence[int] = ()
    wait: Callable[[], None] = lambda: None  # for copies to and from the host's units that began before
    pages: dict[bytes, int] = field(default_factory=dict)  # of reads: units of the host, by key
    state: list[int] = field(default_factory=list)
    done: list[Callable[[], None]] = field(default_factory=list)  # are called by `collect`
    ok: bool = False
    asked: float = 0.0  # when, by the worker's clock
    seconds: float = 0.0  # of reads


class DiskTier:
    """Opens or makes the file. Raises Refused where it cannot be ours."""

    def __init__(
        self, path: Path, num_bytes: int, form: str, cost: Cost, page_len: int, host: Tier, content: Content
    ) -> None:
        self._path, self._form, self._host, self._content = path, form, host, content
        self._header_bytes = header_bytes(page_len)
        self._unit_bytes = self._header_bytes + content.unit_bytes
        num_units = num_bytes // self._unit_bytes
        self._file = open_file(path, num_units * self._unit_bytes)
        self._pieces = _Pieces(num_units, host.mover.units_per_slot, host)
        self.tier = Tier(cost, page_len, self._pieces)
        self._page_len = page_len
        self._age = 0
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._under_way: dict[Entry, _Job] = {}  # reads that others may join, by the last entry in the file
        self._awaited: list[_Job] = []  # reads that have not ended, those of texts that were forgotten, too
        self._num_waiting = 0
        self._warned = False
        self.is_on = True
        self._cost = cost
        self.computing, self.reading = Rate(), Rate()  # seconds for the work of a prompt, for a unit
        self.patience_s = PATIENCE_S
        self.wake: Callable[[], None] = lambda: None  # is called in the other thread when a read has ended
        self._read_index()
        self._worker = Worker("hemiola-disk", READERS, lambda file=self._file: os.close(file))

    # The scheduler's thread.

    @property
    def use(self) -> TierUse:
        """Seen from any thread."""
        return self.tier.use._replace(is_on=self.is_on)

    def keep(self, entry: Entry) -> None:
        """Begin to write an entry of the host's memory, if it is not here and not too much waits."""
        if not self.is_on or self._num_waiting > MOST_WAITING:
            return
        num_units = entry.edge // self._page_len + self._pieces.units_per_slot * (entry.slot_id > 0)
        if not self._pays(self._cost.work(entry.edge), num_units):
            return
        self._pieces.pages, self._pieces.state = [], []
        kept = self.tier.keep(entry)
        if kept is None or not (self._pieces.pages or self._pieces.state):
            return
        job, node = _Job(kept, self._age), kept
        for source, unit in reversed(self._pieces.pages):  # those that are new are the last of the text
            assert node.page_id == unit and node.parent is not None
            job.writes.append((source, unit, self._header(node, None)))
            node = node.parent
        for part, (source, unit) in enumerate(self._pieces.state):
            job.writes.append((source, unit, self._header(kept, part)))
        self._begin(job)

    def fetch(self, chain: Chain, known_len: int, start: int, done: Callable[[], None]) -> bool:
        """Begin to read what lets a request start beyond `start`, into the host's memory. done: `collect`
        calls it when that has ended. False: there is nothing, and done is not called."""
        last = self.tier.match(chain, known_len, start) if self.is_on else None
        if last is None:
            return False
        if last in self._under_way:
            self._under_way[last].done.append(done)
            self._count_use(last)
            return True
        known, missing = self._host.known(last)
        state = self.tier.state_of(last)
        if known is not None and not missing and known.slot_id:
            state = []
        if not missing and not state:
            return False  # the host has it all
        saved = self._cost.work(last.edge) - self._cost.work(start)
        if not self._pays(saved, self._num_waiting + len(missing) + len(state)):
            return False
        with self._host.held(known):
            units = self._host.reserve(len(missing) + len(state))
        if units is None:
            return False
        job = _Job(last, self._age, state=units[len(missing) :], done=[done])
        for entry, unit in zip(missing, units, strict=False):
            job.pages[entry.key] = unit
            job.reads.append((unit, entry.page_id, self._header(entry, None)))
        for part, (unit, source) in enumerate(zip(job.state, state, strict=True)):
            job.reads.append((unit, source, self._header(last, part)))
        self._under_way[last] = job
        self._awaited.append(job)
        self._begin(job)
        self._count_use(last)
        return True

    def _count_use(self, last: Entry) -> None:
        with self.tier.held(last):
            self.tier.count_use(last)

    def _pays(self, work: float, num_units: int) -> bool:
        """Whether to read so many units is worth the work that it saves, as far as both were measured."""
        computing, reading = self.computing.seconds(work), self.reading.seconds(num_units)
        if computing is None or reading is None or reading <= computing + self.patience_s:
            return True
        self.tier.statistics.num_declined += 1
        return self.tier.statistics.num_declined % RETRY == 0

    def _begin(self, job: _Job) -> None:
        job.wait = self._content.settled()
        job.asked = self._worker.clock()
        self._num_waiting += len(job.writes)
        self._host.lend([unit for unit, _, _ in job.writes])
        self._worker.ask(lambda: self._do(job))

    def collect(self) -> None:
        """Make known what the thread has done, and let nobody wait too long for the rest."""
        while not self._done.empty():
            self._end(self._done.get())
        if self.is_on and self._worker.stalled_s > LIMIT_S:
            self._switch_off()
        for job in self._late():
            waiting, job.done = job.done, []
            for done in waiting:
                done()

    def _late(self) -> list[_Job]:
        """Reads for which requests have waited long enough."""
        soonest = self._worker.clock() - LIMIT_S
        waited_for = [job for job in self._awaited if job.done]
        return [job for job in waited_for if not self.is_on or job.asked < soonest]

    @property
    def is_overdue(self) -> bool:
        """Whether `collect` has something to do, of which the thread says nothing."""
        return bool(self._late()) or (self.is_on and self._worker.stalled_s > LIMIT_S)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a read."""
        return any(job.done for job in self._awaited)

    def _switch_off(self) -> None:
        self.is_on = False
        self._age += 1  # what still ends is adopted by nobody
        self.tier.unwatch()
        said = (
            "nothing was read or written for %.0f s; the disk cache is off until the engine is opened again"
        )
        log.error("%s: " + said, self._path, LIMIT_S)

    def _end(self, job: _Job) -> None:
        self._num_waiting -= len(job.writes)
        self._host.take_back([unit for unit, _, _ in job.writes])
        if job.last is None:
            if not job.ok:
                self._warn()
            return
        if job.reads:
            self._awaited.remove(job)
        if self._under_way.get(job.last) is job:
            del self._under_way[job.last]
        is_now = job.age == self._age  # else all was forgotten meanwhile, or the tier is off
        if job.reads and job.ok and is_now:
            self._host.adopt(job.last, job.pages, job.state)
            self.tier.statistics.num_hits += 1
            self.tier.statistics.loaded_units += len(job.reads)
            self.reading.add(len(job.reads), job.seconds)
        elif job.reads:
            self._host.take_back([unit for unit, _, _ in job.reads])
        if not job.ok and is_now:
            self.tier.forget(path_to(job.last)[0])
            self._warn()
        for done in job.done:
            done()

    def _warn(self) -> None:
        if not self._warned:
            log.warning("%s: a part could not be written or read; what it held is computed again", self._path)
        self._warned = True

    def drain(self, seconds: float) -> bool:
        """Wait until all is written; False if that takes longer."""
        end = time.monotonic() + seconds
        while self._num_waiting:
            try:
                self._end(self._done.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                return False
        return True

    def withdraw(self, chain: Chain) -> None:
        """A request that read this text computed NaN: forget it, and keep nothing that is under way."""
        units = self.tier.units_of(chain)
        self.tier.withdraw(chain)
        self._erase(units)

    def flush(self) -> None:
        """Forget everything."""
        self.tier.flush()
        self._erase(range(self._pieces.num_units))

    def _erase(self, units: Sequence[int]) -> None:
        self._age += 1
        self._under_way.clear()
        self._begin(_Job(None, self._age, erased=units))

    def close(self) -> None:
        """End the thread, behind what was asked; a disk that hangs is left to itself."""
        if not self._worker.close(LIMIT_S if self.is_on else 0.0) and self.is_on:
            self._switch_off()
        self.collect()

    def _header(self, entry: Entry, part: int | None) -> dict[str, Any]:
        parent = entry.parent
        assert parent is not None
        salt = parent.tokens if parent.parent is None else b""
        return {
            "magic": MAGIC,
            "form": self._form,
            "key": to_text(entry.key),
            "parent": to_text(parent.key),
            "tokens": to_text(entry.tokens),
            "salt": to_text(salt),
            "edge": entry.edge,
            "kind": entry.kind if part is not None else "",
            "part": part,
        }

    # The other thread.

    def _do(self, job: _Job) -> None:
        try:
            job.wait()
            parts = range(0, len(job.erased), ERASED_AT_ONCE)
            job.ok = self._worker.share(
                self._erase_units, [job.erased[n : n + ERASED_AT_ONCE] for n in parts]
            )
            if self.is_on:
                job.ok &= self._worker.share(self._write_unit, job.writes)
                begun = self._worker.clock()
                job.ok &= self._worker.share(self._read_unit, job.reads)
                job.seconds = self._worker.clock() - begun
        finally:
            self._done.put(job)
            if job.done:
                self.wake()

    def _erase_units(self, units: Sequence[int]) -> bool:
        try:
            for unit in units:
                self._write(unit * self._unit_bytes, bytes(len(MAGIC) + 16))
        except OSError:
            return False
        return True

    def _write_unit(self, piece: tuple[int, int, dict[str, Any]]) -> bool:
        """The content first: a header never stands before what it does not describe."""
        source, unit, header = piece
        content, place = self._content.get(source), unit * self._unit_bytes
        packed = json.dumps(header | {"sha256": hashlib.sha256(content).hexdigest()}).encode()
        assert len(packed) <= self._header_bytes
        try:
            self._write(place, bytes(self._header_bytes))
            self._write(place + self._header_bytes, content)
            self._write(place, packed)
        except OSError:
            return False
        return True

    def _write(self, place: int, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            num = os.pwrite(self._file, rest, place)
            place, rest = place + num, rest[num:]

    def _read_unit(self, piece: tuple[int, int, dict[str, Any]]) -> bool:
        target, unit, wanted = piece
        return self._content.fill(target, lambda room: self._read_into(room, unit, wanted))

    def _read_into(self, room: memoryview, unit: int, wanted: dict[str, Any]) -> bool:
        """Nothing here copies or sums with Python's lock held: readers would wait for each other."""
        start = bytearray(self._header_bytes)
        try:
            num_read = os.preadv(self._file, [start, room], unit * self._unit_bytes)
        except OSError:
            return False
        header = parsed(bytes(start))
        if num_read != self._unit_bytes or header is None:
            return False
        if any(header.get(name) != value for name, value in wanted.items()):
            return False
        return hashlib.sha256(room).hexdigest() == header.get("sha256") and self.is_on

    # When it is opened.

    def _read_index(self) -> None:
        """Entries whose headers are whole and follow from each other."""
        pages: dict[str, tuple[int, dict[str, Any]]] = {}
        states: dict[str, dict[int, int]] = {}
        kinds: dict[str, str] = {}
        for unit in range(self._pieces.num_units):
            header = self._header_of(unit)
            if header is None or header.get("form") != self._form:
                continue
            if header["part"] is None:
                pages[header["key"]] = (unit, header)
            else:
                states.setdefault(header["key"], {})[header["part"]] = unit
                kinds[header["key"]] = header["kind"]
        whole = {
            key: [parts[n] for n in range(self._pieces.units_per_slot)]
            for key, parts in states.items()
            if sorted(parts) == list(range(self._pieces.units_per_slot))
        }
        entries: dict[str, Entry] = {}
        for key, (unit, header) in sorted(pages.items(), key=lambda item: item[1][1]["edge"]):
            entry = self._entry(header, unit, entries)
            if entry is not None:
                entries[key] = entry
        snapshots = {entries[key].key: (kinds[key], units) for key, units in whole.items() if key in entries}
        self.tier.restore(list(entries.values()), snapshots)

    def _header_of(self, unit: int) -> dict[str, Any] | None:
        """None: it is not ours, or the disk cannot read it."""
        try:
            return parsed(os.pread(self._file, self._header_bytes, unit * self._unit_bytes))
        except OSError:
            return None

    def _entry(self, header: dict[str, Any], unit: int, entries: dict[str, Entry]) -> Entry | None:
        """None: it does not follow from one before it."""
        tokens, salt = to_bytes(header["tokens"]), to_bytes(header["salt"])
        parent = entries.get(header["parent"])
        if header["edge"] == self._page_len:
            parent = Entry(digest(b"", salt), None, salt, 0, 0, 0)
        if parent is None or len(tokens) != 4 * self._page_len:
            return None
        key = digest(parent.key, tokens)
        if header["edge"] != parent.edge + self._page_len or header["key"] != to_text(key):
            return None
        return Entry(key, parent, tokens, unit, header["edge"], 0)
