"""A tier below the prefix cache, which keeps what the tier above gave up: memory of the host, or a file.

A tier is units of one page's bytes; a snapshot takes several. The prefix cache's tree and account of cost say
what is found here and what goes. A snapshot is kept with all pages up to its edge, or not at all. Content
comes and goes through a Mover; nothing here sees a tensor.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain as joined
from typing import NamedTuple, Protocol

from hemiola.runtime.cache.depth import Depth
from hemiola.runtime.cache.edges import hit_len
from hemiola.runtime.cache.eviction import Cost, Evictor
from hemiola.runtime.cache.tree import Chain, Entry, Tree


class Mover(Protocol):
    """Copies between an engine's pages and slots and units of the host, in the order of the calls. What is
    saved is what the steps before have written; what is loaded may come later than the call."""

    num_units: int
    units_per_slot: int

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None: ...

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None: ...

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None: ...

    def load_slot(self, units: Sequence[int], slot_id: int) -> None: ...

    def mark(self) -> int:
        """A number, 1 or more, for what was loaded so far."""
        ...

    def has_come(self, number: int) -> bool:
        """Whether what was loaded before this mark is there."""
        ...

    def hold(self, number: int) -> None:
        """Let the steps from now on run behind it; called once for each mark, before its pages or slot are
        read or freed."""
        ...


@dataclass(slots=True)
class TierStatistics:
    """Counts since the start."""

    num_hits: int = 0
    loaded_units: int = 0
    saved_units: int = 0
    evicted_units: int = 0
    num_declined: int = 0  # reads and writes that would have taken longer than computing again


class TierUse(NamedTuple):
    """What a tier has done since the start, and what it holds now."""

    statistics: TierStatistics
    num_units: int
    num_free: int
    unit_bytes: int
    is_on: bool  # it takes and gives


NO_TIER = TierUse(TierStatistics(), 0, 0, 0, False)


class Tier:
    """Called in the scheduler's thread only."""

    def __init__(self, cost: Cost, page_len: int, mover: Mover) -> None:
        self.mover = mover
        self.hybrid = cost.slot_bytes > 0
        self.statistics = TierStatistics()
        self._cost, self._page_len = cost, page_len
        self._lent: Counter[int] = Counter()  # units that somebody else reads or writes
        self._depth: Depth | None = None  # if somebody watches it
        self.num_flushes = 0
        self._start()

    def _start(self) -> None:
        self._held: list[Entry] = []
        self._tree = Tree(self._page_len)
        self._evictor = Evictor(self._cost, self._page_len)
        self._free = [unit for unit in range(self.mover.num_units - 1, -1, -1) if unit not in self._lent]
        self._orphans = set(self._lent)  # lent, and no entry's
        self.states: dict[int, list[int]] = {}  # units of a snapshot, by the entry's slot_id
        self._next_state = 1

    @property
    def num_free(self) -> int:
        """Units."""
        return len(self._free)

    @property
    def num_entries(self) -> int:
        return len(self._tree.entries)

    @property
    def use(self) -> TierUse:
        """Seen from any thread."""
        return TierUse(self.statistics, self.mover.num_units, self.num_free, self._cost.page_bytes, True)

    def watch(self, depth: Depth) -> None:
        """See PrefixCache.watch."""
        self._depth = depth
        for entry in self._starts():
            depth.attach(entry)

    def unwatch(self) -> None:
        """No request starts from here any more: the tier is off."""
        self._forget_depth()
        self._depth = None

    def _forget_depth(self) -> None:
        if self._depth is not None:
            for entry in self._starts():
                self._depth.detach(entry)

    def _starts(self) -> Iterator[Entry]:
        return (entry for entry in self._tree.entries.values() if entry.slot_id or not self.hybrid)

    def tick(self) -> None:
        """A request was admitted."""
        self._evictor.clock += 1

    # What is found.

    def match(self, chain: Chain, known_len: int, start: int) -> Entry | None:
        """The last edge beyond `start` from which a request of so many known tokens may begin."""
        path, _ = self._tree.walk(chain, known_len // self._page_len, step=-1)
        edges = [entry.edge for entry in path if entry.slot_id] if self.hybrid else None
        hit = hit_len(known_len, self._page_len, len(path) * self._page_len, edges)
        return path[hit // self._page_len - 1] if hit > start else None

    @contextmanager
    def held(self, entry: Entry | None) -> Iterator[None]:
        """Meanwhile neither this entry nor what is before it goes, nor its snapshot."""
        if entry is not None:
            self.hold(entry)
        try:
            yield
        finally:
            if entry is not None:
                self.let_go(entry)

    def hold(self, entry: Entry) -> None:
        """Until `let_go`, which is called once for each call of this."""
        self._held.append(entry)
        self._evictor.busy(entry)
        self._evictor.snapshots.remove(entry)

    def let_go(self, entry: Entry) -> None:
        if entry not in self._held:
            return  # everything was forgotten meanwhile
        self._held.remove(entry)
        if entry not in self._held:
            if entry.slot_id:
                self._evictor.snapshots.add(entry)
            self._rest(entry)

    def count_use(self, last: Entry) -> None:
        """A request is to start at this edge. `last` is held."""
        self._evictor.use(last)

    def load(self, last: Entry, num_shared: int, page_ids: Sequence[int], slot_id: int) -> int:
        """Begin to copy what a request needs: its pages behind the first num_shared, and the state. Returns
        the mover's mark. `last` is held."""
        units = [entry.page_id for entry in path_to(last)[num_shared:]]
        self.mover.load_pages(units, page_ids)
        state = self.state_of(last)
        if state:
            self.mover.load_slot(state, slot_id)
        self.count_use(last)
        self.statistics.num_hits += 1
        self.statistics.loaded_units += len(units) + len(state)
        return self.mover.mark()

    # What is kept.

    def keep(self, entry: Entry) -> Entry | None:
        """Copy an entry's snapshot from the tier above, and the pages up to it that are not here; without
        recurrences, the pages. Returns the entry here, or None if there is no room."""
        if entry.edge // self._page_len > self.mover.num_units:
            return None
        last, added = self.known(entry)
        if not all(map(self._may_place, added)):
            return None
        has_state = not self.hybrid or (not added and last is not None and last.slot_id > 0)
        needed = len(added) + (0 if has_state else self.mover.units_per_slot)
        with self.held(last):
            if not self._make_room(needed):
                return None
            units = self._take(len(added))
            for source, unit in zip(added, units, strict=True):
                last = self._place(last, source, unit)
            assert last is not None
            self.mover.save_pages([source.page_id for source in added], units)
            if not has_state:
                state = self._take(self.mover.units_per_slot)
                self.mover.save_slot(entry.slot_id, state)
                self._attach(last, entry.kind, state)
        self._rest(last)
        self.statistics.saved_units += needed
        return last

    # What another tier reads and writes.

    def lend(self, units: Sequence[int]) -> None:
        """Until `take_back` their content stays, even if their entries go."""
        self._lent.update(units)

    def reserve(self, num_units: int) -> list[int] | None:
        """Units to write to, before `adopt` or `take_back`; None if there is no room."""
        if not self._make_room(num_units):
            return None
        units = self._take(num_units)
        self._lent.update(units)
        self._orphans.update(units)
        return units

    def take_back(self, units: Sequence[int]) -> None:
        """They are lent no more."""
        for unit in units:
            self._lent[unit] -= 1
            if self._lent[unit]:
                continue
            del self._lent[unit]
            if unit in self._orphans:
                self._orphans.remove(unit)
                self._free.append(unit)

    def adopt(self, entry: Entry, pages: Mapping[bytes, int], state: Sequence[int]) -> None:
        """An entry of the tier below: pages (by key) up to it and its snapshot are in reserved units."""
        last, missing = self.known(entry)
        for source in missing:
            if source.key not in pages or not self._may_place(source):
                break
            last = self._place(last, source, pages[source.key])
            self._orphans.remove(pages[source.key])
        if state and last is not None and last.edge == entry.edge and not last.slot_id:
            self._attach(last, entry.kind, list(state))
            self._orphans.difference_update(state)
        self.take_back([*pages.values(), *state])
        if last is not None:
            self._rest(last)

    def known(self, entry: Entry) -> tuple[Entry | None, list[Entry]]:
        """The last page of another tier's text that is here, too; and the entries that are not."""
        missing: list[Entry] = []
        node = entry
        while node.parent is not None and not self._has(node.twin):
            missing.append(node)
            node = node.parent
        here = self._tree.roots.get(node.key) if node.parent is None else node.twin
        if here is None or here.tokens != node.tokens:
            return None, missing[::-1]
        while missing:
            source = missing[-1]
            twin = self._tree.entries.get(source.key)
            if twin is None or twin.parent is not here or twin.tokens != source.tokens:
                break
            source.twin = here = twin
            missing.pop()
        return (here if here.parent is not None else None), missing[::-1]

    def _has(self, entry: Entry | None) -> bool:
        return entry is not None and self._tree.entries.get(entry.key) is entry

    def _may_place(self, source: Entry) -> bool:
        """Whether no other text has its hash, and no other tenant that of its root."""
        root = source.parent
        assert root is not None
        here = self._tree.roots.get(root.key) if root.parent is None else None
        return source.key not in self._tree.entries and (here is None or here.tokens == root.tokens)

    def _place(self, parent: Entry | None, source: Entry, unit: int) -> Entry:
        if parent is None:
            root = source.parent
            assert root is not None
            parent = self._tree.roots.get(root.key) or Entry(root.key, None, root.tokens, 0, 0, 0)
        entry = source.twin = self._tree.add(parent, source.key, source.tokens, unit, step=0)
        entry.used = self._evictor.clock
        self._evictor.busy(parent)
        self._evictor.change(parent)
        if self._depth is not None and not self.hybrid:
            self._depth.attach(entry)
        return entry

    def _attach(self, entry: Entry, kind: str, units: list[int]) -> None:
        self.states[self._next_state] = units
        self._evictor.attach(entry, self._next_state, kind)
        self._next_state += 1
        if self._depth is not None:
            self._depth.attach(entry)

    def _rest(self, entry: Entry) -> None:
        if not entry.children and entry not in self._held:
            self._evictor.idle(entry)

    def _take(self, num_units: int) -> list[int]:
        """Free units in order, so that neighbours are copied in one go."""
        first = len(self._free) - num_units
        units = sorted(self._free[first:])
        del self._free[first:]
        return units

    def _make_room(self, num_units: int) -> bool:
        """Give up what is worth least until so many units are free; nothing, where they never would be."""
        if len(self._free) < num_units and not self._could_have(num_units):
            return False
        while len(self._free) < num_units:
            if not self._give_up_one():
                return False
        return True

    def _could_have(self, num_units: int) -> bool:
        """All units can be given up but those that are lent, and those of what is held."""
        left = self.mover.num_units - num_units
        depths = [entry.edge // self._page_len + len(self.state_of(entry)) for entry in self._held]
        if len(self._lent) + sum(depths) <= left:  # even if no two of them are the same
            return True
        kept = set(self._lent)
        for entry in self._held:
            kept.update(page.page_id for page in path_to(entry))
            kept.update(self.state_of(entry))
        return len(kept) <= left

    def _give_up_one(self) -> bool:
        """A page with nothing behind it, with its snapshot; or a snapshot alone, where that is worth less."""
        leaf = self._evictor.page_victim()
        state = self._evictor.snapshot_victim(step=0) if self._evictor.snapshots.entries else None
        if leaf is not None and not leaf.slot_id:
            self._forget(leaf)
        elif state is not None and state.entry.children and self._is_worth_less(state.entry, leaf):
            self._drop_state(state.entry)
        elif leaf is not None:
            self._forget(leaf)
        else:
            return False
        return True

    def _is_worth_less(self, snapshot: Entry, leaf: Entry | None) -> bool:
        """By byte that its going frees."""
        if leaf is None:
            return True
        alone = self._evictor.value(snapshot) / self._cost.slot_bytes
        return alone <= self._evictor.density(leaf)

    def _forget(self, entry: Entry) -> None:
        if entry.slot_id:
            self._drop_state(entry)
        if self._depth is not None and not self.hybrid:
            self._depth.detach(entry)
        self._evictor.busy(entry)
        self._release([entry.page_id])
        parent = self._tree.remove(entry)
        self._evictor.change(parent)
        if parent.parent is not None:
            self._rest(parent)

    def _drop_state(self, entry: Entry) -> None:
        units = self.states.pop(entry.slot_id)
        self._evictor.detach(entry)
        if self._depth is not None:
            self._depth.detach(entry)
        self._release(units)

    def _release(self, units: Sequence[int]) -> None:
        self.statistics.evicted_units += len(units)
        self._orphans.update(unit for unit in units if unit in self._lent)
        self._free.extend(unit for unit in units if unit not in self._lent)

    def withdraw(self, chain: Chain) -> None:
        """A request that read this text computed NaN: forget the text's pages and all behind them."""
        path, _ = self._tree.walk(chain, 1, step=-1)
        if path:
            self.forget(path[0])

    def forget(self, top: Entry) -> None:
        """Forget an entry and all behind it."""
        if self._tree.entries.get(top.key) is not top:
            return
        gone = top.subtree()
        self._held = [entry for entry in self._held if entry not in gone]
        for entry in reversed(gone):
            self._forget(entry)

    def flush(self) -> None:
        """Forget everything."""
        self._forget_depth()
        self.num_flushes += 1
        self._start()

    def restore(self, entries: Sequence[Entry], states: Mapping[bytes, tuple[str, list[int]]]) -> None:
        """Fill an empty tier: entries, each behind its parent, and kinds and units of snapshots by key."""
        taken = {entry.page_id for entry in entries}.union(*(units for _, units in states.values()))
        self._free = [unit for unit in self._free if unit not in taken]
        for source in entries:
            parent = source.parent
            assert parent is not None
            is_out_of_reach = parent.parent is not None and parent.twin is None
            if is_out_of_reach or not self._may_place(source):
                self._free += [source.page_id, *states.get(source.key, ("", []))[1]]
                continue
            entry = self._place(parent.twin, source, source.page_id)
            if source.key in states:
                self._attach(entry, *states[source.key])
            self._rest(entry)

    def units_of(self, chain: Chain) -> list[int]:
        """All that is kept of a text's first page and of what is behind it."""
        path, _ = self._tree.walk(chain, 1, step=-1)
        entries = path[0].subtree() if path else []
        return [unit for entry in entries for unit in (entry.page_id, *self.state_of(entry))]

    def state_of(self, entry: Entry) -> list[int]:
        """The units of an entry's snapshot; none if it has none."""
        return self.states.get(entry.slot_id, [])

    def contents(self) -> Iterator[tuple[list[int], Entry, list[int]]]:
        """Every page with all tokens up to its edge, and the units of its snapshot."""
        for token_ids, entry in self._tree.prefixes():
            yield token_ids, entry, self.state_of(entry)

    def audit(self) -> None:
        """Units, entries and snapshots add up."""
        self._tree.audit()
        entries = list(self._tree.entries.values())
        units = [entry.page_id for entry in entries] + list(joined.from_iterable(self.states.values()))
        units += self._orphans
        assert self._orphans <= set(self._lent), "an orphan is nobody's"
        assert sorted(units + self._free) == list(range(self.mover.num_units)), "units lost or owned twice"
        snapshots = {entry.slot_id for entry in entries if entry.slot_id}
        assert snapshots == set(self.states), "a snapshot is nobody's"
        for entry in entries:
            self._evictor.audit(entry, idle=not entry.children and entry not in self._held)


def path_to(entry: Entry) -> list[Entry]:
    """From the first page to this one."""
    path = []
    node = entry
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
