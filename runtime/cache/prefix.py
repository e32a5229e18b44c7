"""The prefix cache: where a request may start, and which pages and snapshots are kept for later ones.

A page is cached under the tokens up to its end, the engine and the tenant; a snapshot is a slot whose state
stands at a page's edge. A request starts at the last edge with all pages and, for recurrences, a snapshot.

The scheduler's calls, in order. `slot_id` is the request's own slot, which stands for the request here.

    arrival                 request.chain = prefix.chain(request.ids, tenant)
    plan, first of all      prefix.tick()
    plan, running request   prefix.grow(slot_id, total_len) for pages.grow: it evicts first
    plan, waiting request   start = prefix.admit(request.chain, total_len, spare_pages)
                              None: no room, it waits. Else it has the slot start.slot_id, pages for total_len
                              tokens, and committed_len = start.hit_len. Before the step runs, in the order of
                              admission: storage.copy_slot(start.restore_from, slot_id), if that is not 0.
                              If start.load is not 0: prefix.hold(start.load) before its first step or its
                              release; once prefix.has_come(start.load), that step does not wait
    plan, prompt's chunk    stop = prefix.chunk_end(slot_id, start, stop): one snapshot per row and step
    plan, last of all       take = prefix.take(slot_id, edge, next_edge) for each row: its snapshot slot and
                              edge in this step, or None. Last: admit goes first where slots are scarce
    commit                  prefix.commit(slot_id, committed_len, total_len, snapshot_edge, chose, step),
                              after slots.commit, when the committed tokens' keys and values are written, the
                              draft layers' too. For a row that computed NaN instead: prefix.withdraw(slot_id)
    finish, preempt, abort  prefix.release(slot_id, donate) for pages.release and slots.release. donate: the
                              state is sound, and no step is under way that may write it
    after finish or abort   prefix.forget_unproven(request.chain, total_len)
    between two steps       prefix.flush(); prefix.audit(), which audits pages and slots too

Decisions:
* A page that two requests computed is kept once: `commit` swaps the second one's copy for the cached page,
  which holds the same. So a request that holds a cached page holds all before it, idle pages are exactly
  those that can be evicted, and admission counts on all of them.
* What a step computes is not found in that step: entries know the step in which they were published.
* A page goes only after those behind it, and takes its snapshot along: no snapshot is ever out of reach.
* Chunks of a prompt are published before anybody can see if they hold NaN; a token chosen behind them proves
  them. NaN withdraws a text's pages and all behind them, and who runs from them starts anew. That is so for
  pages that were proven, too: they may have spoilt since, and every request that begins there would fail. If
  they have not, others compute them again. Who starts anew shares nothing from then on: it does so once,
  however many requests of its first page compute NaN. What nobody has proven leaves with its last holder.
"""

import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from hemiola.runtime.cache.audit import audit
from hemiola.runtime.cache.depth import Depth
from hemiola.runtime.cache.disk import Content, DiskTier
from hemiola.runtime.cache.edges import hit_len, reusable_len, wanted_edges
from hemiola.runtime.cache.eviction import Evictor
from hemiola.runtime.cache.lease import Lease, Start, Take
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.cache.tier import NO_TIER, Tier, TierUse
from hemiola.runtime.cache.tree import Chain, Entry, Lacked, Tree
from hemiola.runtime.errors import Name, Refused

SAVE_SECONDS = 10.0
LOOK_AGAIN = 8  # steps
NOW = 2**63  # a step behind all others


def no_room(edge: int) -> Refused:
    """Of the host's memory, for a prefix."""
    message = f"the host's memory has no room for a prefix of {edge} tokens"
    return Refused(
        "exhausted", "host_cache_bytes", message=message, way_out=("raise ", Name("host_cache_bytes"))
    )


class Match(NamedTuple):
    """What a request may start from."""

    path: list[Entry]  # cached pages that it shares
    hit: Entry | None  # the last of them, if it starts there
    junction: int  # the edge at which the request leaves a cached path that goes on, or 0
    host: Entry | None  # else it starts at this edge, from what the host keeps
    start: int
    cached_len: int = 0  # tokens that have pages


class PrefixCache:
    """Gives requests their pages and slots and takes them back; keeps what later requests can start from."""

    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        evictor: Evictor,
        identity: str = "",
        interval: int = 0,
        enabled: bool = True,
        host: Tier | None = None,
        disk: DiskTier | None = None,
        content: Content | None = None,
    ) -> None:
        assert pages.page_len % slots.chunk_len == 0 and interval % pages.page_len == 0
        self.pages = pages
        self.slots = slots
        self.evictor = evictor
        self.page_len = pages.page_len
        self.hybrid = evictor.cost.slot_bytes > 0
        self.identity = identity
        self.interval = interval
        self.enabled = enabled  # else requests begin at 0 and leave nothing
        self.host, self.disk = host, disk
        self._depth: Depth | None = None  # if somebody watches it
        self.content = content  # of the host's units
        self.step = 0
        self.statistics = Statistics()
        self._tree = Tree(self.page_len)
        self._leases: dict[int, Lease] = {}

    def chain(self, ids: np.ndarray, tenant: str = "") -> Chain:
        """The page keys of one request; `ids` is the array to which its tokens will be appended."""
        salt = sha256(self.identity.encode()).digest() + tenant.encode()  # see disk_file.header_bytes
        return Chain(ids, salt, self.page_len)

    @property
    def tiers(self) -> dict[str, TierUse]:
        """Of what is below the cache: the host's memory and the disk. Seen from any thread."""
        return {
            "host": NO_TIER if self.host is None else self.host.use,
            "disk": NO_TIER if self.disk is None else self.disk.use,
        }

    def watch(self, depth: Depth) -> None:
        """Let it know where requests can start now, and each time when that changes."""
        self._depth = depth
        for entry in self._tree.entries.values():
            if entry.slot_id or not self.hybrid:
                depth.attach(entry)
        if self.host is not None:
            self.host.watch(depth)
        if self.disk is not None and self.disk.is_on:
            self.disk.tier.watch(depth)

    def tick(self) -> None:
        """A step begins."""
        self.step += 1
        self.collect()

    # What comes from a file.

    def fetch(self, chain: Chain, known_len: int, done: Callable[[], None]) -> bool:
        """Begin to read a longer hit from the file than there is in memory. If there is one, `collect` calls
        `done` when it has been read."""
        if self.disk is None:
            return False
        return self.disk.fetch(chain, known_len, self._match(chain, known_len).start, done)

    def collect(self) -> None:
        """Make known what has been read and written."""
        if self.disk is not None:
            self.disk.collect()

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step read so many tokens of prompts, and nothing else, in so many seconds."""
        if self.disk is not None:
            self.disk.computing.add(num_tokens, seconds)

    @property
    def is_overdue(self) -> bool:
        """Whether requests have waited long enough for a file: nobody but `collect` lets them go on."""
        return self.disk is not None and self.disk.is_overdue

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a file: a request, or who packs a prefix."""
        return self.disk is not None and self.disk.is_awaited

    def save(self) -> None:
        """Let the file keep what requests could start from, before all ends; so much as there is time for."""
        if self.disk is None or not self.disk.is_on:
            return
        end = time.monotonic() + SAVE_SECONDS
        for entry in list(self._tree.entries.values()):
            if not self.disk.drain(end - time.monotonic()):
                return
            self._keep(entry)

    # Admission.

    def admit(self, chain: Chain, known_len: int, spare_pages: int = 0, may_hit: bool = True) -> Start | None:
        """Let a request run from its longest hit. None if a slot, or pages for one token more, cannot be had.

        Beside them, spare_pages pages must stay free or idle.
        """
        if self._lacks_still(chain, spare_pages):
            return None
        may_hit = self.enabled and may_hit and not chain.alone
        match = self._match(chain, known_len) if may_hit else Match([], None, 0, None, 0)
        if self.host is None:
            return self._admit(chain, known_len, spare_pages, match)
        with self.host.held(match.host):
            start = self._admit(chain, known_len, spare_pages, match)
        if start is not None:
            self.host.tick()
            if self.disk is not None:
                self.disk.tier.tick()
        return start

    def _admit(self, chain: Chain, known_len: int, spare_pages: int, match: Match) -> Start | None:
        path, hit = match.path, match.hit
        page_ids = [entry.page_id for entry in path]
        num_new = self.pages.count(known_len + 1) - len(path)
        num_waking = sum(self.pages.refs[page_id] == 0 for page_id in page_ids)
        if self.num_available - num_waking - num_new < spare_pages:
            chain.lacked = Lacked(self.num_available - spare_pages, self.step)
            return None
        chain.lacked = None
        slot_id, restore_from = self._own_slot(hit)
        if slot_id == 0:
            return None
        self.pages.share(slot_id, page_ids)
        if path:
            self.evictor.busy(path[-1])
        if hit is not None:
            self.evictor.use(hit)
        grown = self.grow(slot_id, known_len + 1)
        assert grown, "fewer pages could be evicted than are idle"
        start, load = match.start, 0
        if match.host is not None and self.host is not None:
            pages = self.pages.table[slot_id, len(path) : start // self.page_len].tolist()
            load = self.host.load(match.host, len(path), pages, slot_id)
        self.slots.edge[slot_id] = start
        junction = match.junction if match.junction > start else 0
        began = [(hit, hit.number)] if hit is not None and hit.slot_id else []
        is_stale = chain.alone or not self.enabled
        self._leases[slot_id] = Lease(chain, known_len, junction, path, began, is_stale, loaded=load > 0)
        self.evictor.clock += 1
        self.statistics.num_queries += 1
        self.statistics.num_hits += start > 0
        self.statistics.query_tokens += known_len
        self.statistics.hit_tokens += start
        self.statistics.page_hit_tokens += match.cached_len
        return Start(slot_id, start, restore_from, load)

    def _lacks_still(self, chain: Chain, spare_pages: int) -> bool:
        """No pages have come since it lacked some: so long a text is not looked up again in every step. Now
        and then it is, since others may have published what it can share."""
        lacked = chain.lacked
        if lacked is None or self.step >= lacked.step + LOOK_AGAIN:
            return False
        return self.num_available - spare_pages <= lacked.num_available

    def has_come(self, load: int) -> bool:
        """Whether what a request starts from has come from the host's memory."""
        assert self.host is not None
        return self.host.mover.has_come(load)

    def hold(self, load: int) -> None:
        """Let the steps that are launched from now on run behind it."""
        assert self.host is not None
        self.host.mover.hold(load)

    def _match(self, chain: Chain, known_len: int) -> Match:
        max_pages = reusable_len(known_len, self.page_len) // self.page_len
        path, forks = self._tree.walk(chain, max_pages, self.step)
        cached_len = len(path) * self.page_len
        edges = [entry.edge for entry in path if entry.slot_id] if self.hybrid else None
        start = hit_len(known_len, self.page_len, cached_len, edges)
        host = self.host.match(chain, known_len, start) if self.host is not None else None
        if host is not None:
            start = host.edge
        path = path[: start // self.page_len]
        hit = path[-1] if path and host is None else None
        return Match(path, hit, cached_len if forks and self.hybrid else 0, host, start, cached_len)

    def _own_slot(self, hit: Entry | None) -> tuple[int, int]:
        """A slot for a request that starts at `hit`, and the snapshot to restore; (0, 0) if there is none.

        If nothing else is left, the request takes over the snapshot's slot.
        """
        if hit is None or not self.hybrid:
            return self._free_slot(), 0
        pinned, hit.pinned = hit.pinned, self.step
        slot_id = self._free_slot()
        if slot_id or pinned == self.step:
            return slot_id, hit.slot_id if slot_id else 0
        slot_id = hit.slot_id
        self._keep(hit)
        self.evictor.use(hit)
        self._detach(hit)
        return slot_id, 0

    def _free_slot(self, value: float | None = None) -> int:
        """A slot, for a snapshot only if that is worth more than the one it displaces; 0 if there is none."""
        if self.slots.num_free:
            return self.slots.acquire()
        victim = self.evictor.snapshot_victim(self.step)
        if victim is None:
            return 0
        if value is not None and value < victim.value:
            self.statistics.refused_snapshots += 1
            return 0
        self.statistics.evicted_snapshots += 1
        self._keep(victim.entry)
        self._drop_snapshot(victim.entry)
        return self.slots.acquire()

    def _drop_snapshot(self, entry: Entry) -> None:
        slot_id = entry.slot_id
        self._detach(entry)
        self.slots.release(slot_id)

    def _detach(self, entry: Entry) -> None:
        self.evictor.detach(entry)
        if self._depth is not None:
            self._depth.detach(entry)

    # Pages.

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.pages.num_free + self.pages.num_idle

    def grow(self, slot_id: int, num_tokens: int) -> bool:
        """Let a running request hold so many tokens; False, and nothing done, if too few pages can be had."""
        missing = self.pages.count(num_tokens) - self.pages.capacity[slot_id] // self.page_len
        if missing > self.num_available:
            return False
        while missing > self.pages.num_free:
            entry = self.evictor.page_victim()
            assert entry is not None, "pages are idle, but none can be evicted"
            self._evict(entry)
        return self.pages.grow(slot_id, num_tokens)

    def _evict(self, entry: Entry) -> None:
        self.statistics.evicted_pages += 1
        self.statistics.stranded_snapshots += entry.slot_id > 0
        self._keep(entry)
        self._forget(entry)

    def _keep(self, entry: Entry) -> None:
        """On the host, if requests could start from it: what nobody has proven may hold NaN."""
        if self.host is None or not self._is_proven(entry):
            return
        kept = self.host.keep(entry)
        if kept is not None and self.disk is not None:
            self.disk.keep(kept)

    def _is_proven(self, entry: Entry) -> bool:
        """Requests can start from it, and it holds no NaN."""
        if self.hybrid and not (entry.slot_id and entry.snapshot_proven):
            return False
        node, seen = entry, [entry]
        while node.proven and not node.sound and node.parent is not None and node.parent.parent is not None:
            node = node.parent
            seen.append(node)
        if not node.proven:
            return False
        for one in seen:
            one.sound = True
        return True

    def keep_deepest(self, chain: Chain, num_tokens: int) -> Entry | None:
        """The last edge of a text from which requests could start, as the host has it: what the cache has
        beyond that is copied there. None: there is none. Raises Refused where the host has no room."""
        assert self.host is not None
        deepest = self.host.match(chain, num_tokens + 1, 0)
        path, _ = self._tree.walk(chain, num_tokens // self.page_len, step=-1)
        for entry in reversed(path[deepest.edge // self.page_len if deepest is not None else 0 :]):
            if self._is_proven(entry):
                deepest = self.host.keep(entry)
                if deepest is None:
                    raise no_room(entry.edge)
                break
        return deepest

    def _forget(self, entry: Entry) -> None:
        """Give up a page with nothing behind it, and its snapshot."""
        if entry.slot_id:
            self._drop_snapshot(entry)
        if self._depth is not None and not self.hybrid:
            self._depth.detach(entry)
        self.evictor.busy(entry)
        self.pages.drop(entry.page_id)
        parent = self._tree.remove(entry)
        self.evictor.change(parent)
        if parent.parent is not None and not parent.children and self.pages.refs[parent.page_id] == 0:
            if not parent.slot_id:
                parent.used = max(parent.used, entry.used)
            self.evictor.idle(parent)

    # Snapshots.

    def chunk_end(self, slot_id: int, start: int, stop: int) -> int:
        """Where a prompt's chunk up to `stop` should end to miss no snapshot. start: the slot's edge."""
        lease = self._leases[slot_id]
        edges = self._wanted(lease, start, stop)
        last = reusable_len(lease.prompt_len, self.page_len)
        return edges[0] if len(edges) > 1 and edges[1] <= last else stop

    def take(self, slot_id: int, start: int, stop: int) -> Take | None:
        """The snapshot to store in a step that moves a slot's state from edge `start` to edge `stop`.

        Where they are bounds, a step may not come to the edge: then later steps ask for it again.
        """
        lease = self._leases[slot_id]
        for take in lease.taken:
            if take.edge > start:
                return take
        edges = self._wanted(lease, start, stop)
        if not edges:
            return None
        edge = edges[0]
        kind = lease.kind_of(edge, self.page_len, self.interval)
        if kind == "decode" and not self.slots.num_free:
            self._drop_newest(lease)
        near = next((entry.edge for entry in reversed(lease.path) if entry.slot_id), 0)
        target = self._free_slot(self.evictor.promise(kind, near, edge))
        if target == 0:
            return None
        lease.taken.append(Take(target, edge))
        return lease.taken[-1]

    def _wanted(self, lease: Lease, start: int, stop: int) -> list[int]:
        if not self.hybrid or lease.stale:
            return []
        edges = wanted_edges(start, stop, lease.prompt_len, self.page_len, lease.junction, self.interval)
        return [edge for edge in edges if not self._has_snapshot(lease, edge)]

    def _has_snapshot(self, lease: Lease, edge: int) -> bool:
        """Whether somebody else, in the meantime, stored the snapshot of an edge within the prompt."""
        if edge > reusable_len(lease.prompt_len, self.page_len):
            return False  # the key may depend on a token that is not known yet
        entry = self._tree.find(lease.chain, edge // self.page_len - 1)
        return entry is not None and entry.slot_id > 0

    def _drop_newest(self, lease: Lease) -> None:
        """A request keeps one decode snapshot; the last goes when the next is stored, or needs its slot."""
        if lease.newest is not None and self._is_outdone(lease.newest):
            self._drop_snapshot(lease.newest)

    def _is_outdone(self, entry: Entry) -> bool:
        """Whether a decode snapshot may go once its request has a newer one: nobody else came to need it."""
        return (
            entry.slot_id > 0 and entry.kind == "decode" and entry.num_uses == 0 and len(entry.children) < 2
        )

    # After a step, and at the end.

    def commit(
        self,
        slot_id: int,
        valid_len: int,
        known_len: int,
        snapshot_edge: int = 0,
        chose: bool = False,
        step: int = NOW,
    ) -> None:
        """Publish the full pages among the first valid_len tokens, and the snapshot that was taken.

        known_len: of the request's ids. snapshot_edge: of the snapshot that the step was asked for; it stored
        it if the state stands there or beyond now. chose: the step chose a token behind them that was no NaN.
        step: its number, when it was planned. Calling it again changes nothing.
        """
        lease = self._leases[slot_id]
        if chose and (lease.swapped or not lease.proven):
            self._prove(lease, step)
        self._publish(lease, slot_id, min(valid_len, known_len) // self.page_len)
        while lease.taken and lease.taken[0].edge <= self.slots.edge[slot_id]:
            target, edge = lease.taken.pop(0)
            entry = self._entry_at(lease, edge)
            if edge != snapshot_edge or entry is None or entry.slot_id:
                self.slots.release(target)
            else:
                self._attach(lease, entry, target)

    def _prove(self, lease: Lease, step: int) -> None:
        """Of the pages that it has read. One that it is about to swap its own for is not among them, nor one
        that it got while the step was under way."""
        read = [entry for entry, since in lease.swapped if since < step]
        lease.swapped = [(entry, since) for entry, since in lease.swapped if since >= step]
        if not lease.proven:
            unread = {entry for entry, _ in lease.swapped}
            read = [entry for entry in lease.path if entry not in unread]
        lease.proven = True
        for entry in read:
            entry.proven = True
        for entry, number in lease.unproven:
            entry.snapshot_proven |= entry.number == number  # else another has taken it anew
        lease.unproven.clear()

    def _publish(self, lease: Lease, slot_id: int, num_pages: int) -> None:
        while len(lease.path) < num_pages and not lease.stale:
            index = len(lease.path)
            page_id = int(self.pages.table[slot_id, index])
            entry = self._tree.place(lease.chain, lease.path, page_id, self.step)
            if entry is None:
                lease.stale = True
                return
            if entry.page_id == page_id:
                entry.proven = lease.proven
                self.pages.keep(page_id)
                if self._depth is not None and not self.hybrid:
                    self._depth.attach(entry)
                if lease.path:
                    self.evictor.change(lease.path[-1])
            else:
                self.evictor.busy(entry)
                self.pages.swap(slot_id, index, entry.page_id)
                if not entry.proven:
                    lease.swapped.append((entry, self.step))
            lease.path.append(entry)

    def _entry_at(self, lease: Lease, edge: int) -> Entry | None:
        index = edge // self.page_len - 1
        return lease.path[index] if not lease.stale and 0 <= index < len(lease.path) else None

    def _attach(self, lease: Lease, entry: Entry, slot_id: int) -> None:
        self.slots.edge[slot_id] = entry.edge
        kind = lease.kind_of(entry.edge, self.page_len, self.interval)
        self.evictor.attach(entry, slot_id, kind)
        if self._depth is not None:
            self._depth.attach(entry)
        self.statistics.num_snapshots += 1
        entry.number = self.statistics.num_snapshots
        entry.snapshot_proven = lease.proven
        if not lease.proven:
            lease.unproven.append((entry, entry.number))
        if kind == "decode":
            self._drop_newest(lease)
            lease.newest = entry

    def release(self, slot_id: int, donate: bool = False) -> None:
        """A request runs no more. With `donate` its slot becomes a snapshot if it stands at a page's edge."""
        lease = self._leases.pop(slot_id)
        for take in lease.taken:
            self.slots.release(take.slot_id)
        edge = self.slots.edge[slot_id]
        entry = self._entry_at(lease, edge) if donate and self.hybrid and edge % self.page_len == 0 else None
        if entry is not None and not entry.slot_id:
            self._drop_newest(lease)
            self._attach(lease, entry, slot_id)
        else:
            self.slots.release(slot_id)
        self.pages.release(slot_id)
        if lease.path:
            self._rest(lease.path[-1])

    def _rest(self, entry: Entry) -> None:
        if not entry.slot_id:
            entry.used = self.evictor.clock
        if not entry.children and self.pages.refs[entry.page_id] == 0:
            self.evictor.idle(entry)

    def withdraw(self, slot_id: int) -> list[int]:
        """The request computed NaN: forget the pages of its text, and all that is cached behind them.

        Returns the other slots that hold such pages, or copies of them.
        """
        lease = self._leases[slot_id]
        affected = self._retire_loaded(lease)
        affected += self._withdraw(lease.path[0]) if lease.path else []
        if self.host is not None:
            self.host.withdraw(lease.chain)
        if self.disk is not None:
            self.disk.withdraw(lease.chain)
        self._retire(lease)
        return [other for other in affected if other != slot_id]

    def forget_unproven(self, chain: Chain, known_len: int) -> None:
        """A request has ended: forget those of its pages and snapshots that nobody has proven or holds."""
        for entry in self._tree.walk(chain, known_len // self.page_len, step=-1).path:
            if not entry.proven and self.pages.refs[entry.page_id] == 0:
                self._withdraw(entry)
                return
            if entry.slot_id and not entry.snapshot_proven:
                self._drop_snapshot(entry)

    def _withdraw(self, top: Entry) -> list[int]:
        """Forget a page and all behind it; returns the slots that run from it. They publish nothing more."""
        affected = [slot for slot, lease in self._leases.items() if lease.path and lease.path[0] is top]
        for slot_id in affected:
            self._retire(self._leases[slot_id])
        for entry in reversed(top.subtree()):
            self._forget(entry)
        return affected

    def _retire_loaded(self, lease: Lease) -> list[int]:
        """Who began from the host's copy of the same text, and has no page in the tree yet; the slots."""
        if lease.stale or not (lease.path or lease.loaded):
            return []
        key = lease.chain.key(0)
        copies = [(n, one) for n, one in self._leases.items() if one.loaded and not (one.path or one.stale)]
        affected = [n for n, one in copies if one is not lease and one.chain.key(0) == key]
        for slot_id in affected:
            self._retire(self._leases[slot_id])
        return affected

    def _retire(self, lease: Lease) -> None:
        lease.path, lease.newest, lease.stale = [], None, True
        lease.unproven.clear()
        lease.swapped.clear()

    def flush(self) -> None:
        """Forget everything. What runs goes on, but publishes nothing more."""
        for entry in self._tree.entries.values():
            if entry.slot_id:
                self._drop_snapshot(entry)
            if self._depth is not None and not self.hybrid:
                self._depth.detach(entry)
            self.evictor.busy(entry)
            self.pages.drop(entry.page_id)
        self._tree.clear()
        for lease in self._leases.values():
            self._retire(lease)
        if self.host is not None:
            self.host.flush()
        if self.disk is not None:
            self.disk.flush()

    @property
    def num_entries(self) -> int:
        """Cached pages, of all tiers."""
        tiers = [self.host, None if self.disk is None else self.disk.tier]
        return len(self._tree.entries) + sum(tier.num_entries for tier in tiers if tier is not None)

    def contents(self) -> Iterator[tuple[list[int], Entry]]:
        """Every cached page with all tokens up to its edge, from which it and its snapshot were computed."""
        return self._tree.prefixes()

    def audit(self) -> None:
        """Pages, slots, entries and running requests add up."""
        audit(self.pages, self.slots, self.evictor, self._tree, self._leases)
        if self.host is not None:
            self.host.audit()
        if self.disk is not None:
            self.disk.tier.audit()
