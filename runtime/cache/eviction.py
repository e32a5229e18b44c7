"""What a cached page or snapshot is worth, and which one to give up.

A snapshot is worth the work that only it saves (from the edge of the snapshot above to its own) times the
chance per unit of time that a request starts from it. That chance is learned: snapshots of one group (why
they were taken, what hangs below them, how often they were used) behave alike at the same age. Time is
counted in admitted requests, so that load does not matter.

A choice looks at all entries, or at a random SAMPLE of them if there are more; pages that save nothing come
from a heap. All else that is done to an entry is O(log n), but for taking a snapshot, which walks the pages
up and down to the next ones, and giving up a branch, for which those of the sample are walked up.
"""

import heapq
import math
import random
from typing import NamedTuple

from hemiola.runtime.cache.tree import Entry, ReuseGroup

SAMPLE = 32
BINS = 16  # of age: 0, 1, 2..3, 4..7, 8..15, ...
WIDTHS = [1, *(1 << n for n in range(BINS - 1))]


class Cost(NamedTuple):
    """Work that a cached prefix saves, in units of the caller's choice, and the bytes that keep it."""

    page_bytes: int
    slot_bytes: int  # 0: no recurrences, and no need of snapshots
    token: float = 1.0  # per token: weights and recurrences
    pair: float = 0.0  # per token and earlier token: attention

    def work(self, num_tokens: int) -> float:
        """Of computing a prompt's first tokens."""
        return num_tokens * (self.token + 0.5 * self.pair * num_tokens)


class Reuse:
    """How soon the members of a group are used again, from what became of earlier ones."""

    def __init__(self) -> None:
        self._uses: dict[ReuseGroup, list[float]] = {}  # by age
        self._time: dict[ReuseGroup, list[float]] = {}  # spent at that age, by all members
        self._all_uses = [0.5] * BINS  # a guess until there is more: a chance of 1 / (2 * age), which is LRU
        self._all_time = [float(width + 1) for width in WIDTHS]
        self._indices: dict[ReuseGroup, list[float]] = {}
        self._num_records = 0

    def record(self, group: ReuseGroup, since: int, age: int, used: bool) -> None:
        """A member was used at `age`, or left the group; before, it was seen up to age `since`."""
        uses = self._uses.setdefault(group, [0.0] * BINS)
        time = self._time.setdefault(group, [0.0] * BINS)
        last = _bin(age)
        start = 0.0
        for number in range(last + 1):
            end = start + WIDTHS[number] if number < last else age + 0.5
            spent = max(end - max(start, since), 0.0)
            time[number] += spent
            self._all_time[number] += spent
            start = end
        uses[last] += used
        self._all_uses[last] += used
        self._num_records += 1
        if self._num_records % 128 == 0 or self._num_records & (self._num_records - 1) == 0:
            self._indices.clear()

    def index(self, group: ReuseGroup, age: int) -> float:
        """The most uses per unit of time that keeping a member of this age, for whatever time, will bring."""
        indices = self._indices.get(group)
        if indices is None:
            indices = self._indices[group] = self._gittins(group)
        return indices[_bin(age)]

    def _gittins(self, group: ReuseGroup) -> list[float]:
        rates = self._rates(group)
        indices: list[float] = []
        for first in range(BINS):
            alive, uses, time, best = 1.0, 0.0, 0.0, 0.0
            for rate, width in zip(rates[first:], WIDTHS[first:], strict=True):
                used = alive * -math.expm1(-rate * width)
                uses += used
                time += used / rate
                alive -= used
                best = max(best, uses / time)
            indices.append(best)
        return indices

    def _rates(self, group: ReuseGroup) -> list[float]:
        """Uses per time by age; one use at the rate of all groups is assumed beside those seen."""
        uses = self._uses.get(group, [0.0] * BINS)
        time = self._time.get(group, [0.0] * BINS)
        return [(uses[n] + 1.0) / (time[n] + self._all_time[n] / self._all_uses[n]) for n in range(BINS)]


def _bin(age: int) -> int:
    return min(age.bit_length(), BINS - 1)


class Bag:
    """A set of entries that can be sampled."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._at: dict[Entry, int] = {}
        self._random = random.Random(0)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._at

    def add(self, entry: Entry) -> None:
        if entry not in self._at:
            self._at[entry] = len(self.entries)
            self.entries.append(entry)

    def remove(self, entry: Entry) -> None:
        at = self._at.pop(entry, None)
        if at is None:
            return
        last = self.entries.pop()
        if last is not entry:
            self.entries[at] = last
            self._at[last] = at

    def sample(self) -> list[Entry]:
        if len(self.entries) <= SAMPLE:
            return self.entries
        return [self.entries[int(self._random.random() * len(self.entries))] for _ in range(SAMPLE)]


class Oldest:
    """A set of entries that knows the least recently used one. `used` must not change meanwhile."""

    def __init__(self) -> None:
        self._turns: dict[Entry, int] = {}
        self._heap: list[tuple[int, int, Entry]] = []
        self._count = 0

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._turns

    def add(self, entry: Entry) -> None:
        self._count += 1
        self._turns[entry] = self._count
        heapq.heappush(self._heap, (entry.used, self._count, entry))
        if len(self._heap) > 2 * len(self._turns) + 64:
            self._heap = [item for item in self._heap if self._turns.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def remove(self, entry: Entry) -> None:
        self._turns.pop(entry, None)

    def first(self) -> Entry | None:
        while self._heap and self._turns.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


class Victim(NamedTuple):
    entry: Entry
    value: float


class Evictor:
    """Is told what happens to entries, and names the ones to give up."""

    def __init__(self, cost: Cost, page_len: int) -> None:
        self.cost = cost
        self.page_len = page_len
        self.clock = 0  # requests admitted
        self.reuse = Reuse()
        self.snapshots = Bag()
        self.leaves = Bag()  # idle pages with a snapshot and nothing behind them
        self.tails = Oldest()  # the other idle pages with nothing behind them

    # What happens.

    def attach(self, entry: Entry, slot_id: int, kind: str) -> None:
        """A snapshot was taken, or came from the tier below."""
        entry.slot_id = slot_id
        entry.kind = kind
        entry.num_uses = 0
        entry.used = self.clock
        entry.above = _snapshot_above(entry)
        for other in _snapshots_below(entry):
            other.above = entry
        self.snapshots.add(entry)
        self._join(entry)
        if entry in self.tails:
            self.tails.remove(entry)
            self.leaves.add(entry)

    def detach(self, entry: Entry) -> None:
        """Its slot serves something else."""
        self._leave(entry, used=False)
        self.snapshots.remove(entry)
        entry.slot_id = 0
        if entry in self.leaves:
            self.leaves.remove(entry)
            self.tails.add(entry)

    def use(self, entry: Entry) -> None:
        """A request starts at this edge."""
        if entry.slot_id:
            self._leave(entry, used=True)
            entry.num_uses += 1
        entry.used = self.clock
        if entry.slot_id:
            self._join(entry)

    def change(self, entry: Entry) -> None:
        """The entry got or lost a child."""
        if entry.slot_id:
            self._leave(entry, used=False)
            self._join(entry)

    def idle(self, entry: Entry) -> None:
        """No slot holds the entry, and no entry is behind it: it can be evicted."""
        if entry.slot_id:
            self.leaves.add(entry)
        else:
            self.tails.add(entry)

    def busy(self, entry: Entry) -> None:
        """The entry is not idle any more."""
        self.leaves.remove(entry)
        self.tails.remove(entry)

    def audit(self, entry: Entry, idle: bool) -> None:
        """An idle entry can be evicted, for what it saves; others cannot."""
        known = entry in self.leaves, entry in self.tails
        has_snapshot = entry.slot_id > 0
        assert known == (idle and has_snapshot, idle and not has_snapshot), (
            f"page {entry.page_id} can be evicted: {idle}, has a snapshot: {has_snapshot}, known as {known}"
        )

    def _join(self, entry: Entry) -> None:
        entry.group = ReuseGroup(entry.kind, min(len(entry.children), 2), min(entry.num_uses, 2))
        entry.since = self.clock - entry.used

    def _leave(self, entry: Entry, used: bool) -> None:
        assert entry.group is not None
        self.reuse.record(entry.group, entry.since, self.clock - entry.used, used)

    # What to give up.

    def snapshot_victim(self, step: int) -> Victim | None:
        """The snapshot of least value that is not read in this step."""
        for entries in (self.snapshots.sample(), self.snapshots.entries):
            free = [Victim(entry, self.value(entry)) for entry in entries if entry.pinned != step]
            if free:
                return min(free, key=_value)
        return None

    def page_victim(self) -> Entry | None:
        """An idle page with nothing behind it: one that saves nothing, or of least value per byte freed."""
        tail = self.tails.first()
        if tail is not None or not self.leaves.entries:
            return tail
        return min(self.leaves.sample(), key=self.density)

    def value(self, entry: Entry) -> float:
        """Work that a snapshot will save per unit of time."""
        assert entry.group is not None
        return self.reuse.index(entry.group, self.clock - entry.used) * self.gain(entry)

    def promise(self, kind: str, start: int, edge: int) -> float:
        """The value of a snapshot not yet taken; `start`: the edge of the one above."""
        group = ReuseGroup(kind, 2 if kind == "junction" else 0, 0)
        return self.reuse.index(group, 0) * (self.cost.work(edge) - self.cost.work(start))

    def gain(self, entry: Entry) -> float:
        """Work that only this snapshot saves."""
        return self.cost.work(entry.edge) - self.cost.work(above(entry).edge)

    def density(self, entry: Entry) -> float:
        """Value by bytes that its eviction frees: pages that another branch needs too would stay."""
        num_pages = (entry.edge - _fork_above(entry).edge) // self.page_len
        return self.value(entry) / (self.cost.slot_bytes + num_pages * self.cost.page_bytes)


def _value(victim: Victim) -> float:
    return victim.value


def above(entry: Entry) -> Entry:
    """The nearest snapshot before a snapshot, or the root."""
    node = entry.above
    assert node is not None
    while not node.slot_id and node.above is not None:
        node = node.above
    entry.above = node
    return node


def _fork_above(entry: Entry) -> Entry:
    """The nearest page before it that something else needs: a snapshot, another branch; or the root."""
    node = entry.parent
    assert node is not None
    while node.parent is not None and not node.slot_id and len(node.children) == 1:
        node = node.parent
    return node


def _snapshot_above(entry: Entry) -> Entry:
    node = entry.parent
    assert node is not None
    while node.parent is not None and not node.slot_id:
        node = node.parent
    return node


def _snapshots_below(entry: Entry) -> list[Entry]:
    """The next ones on each path."""
    snapshots: list[Entry] = []
    stack = list(entry.children)
    while stack:
        node = stack.pop()
        if node.slot_id:
            snapshots.append(node)
        else:
            stack.extend(node.children)
    return snapshots
