"""Whether pages, slots, cached entries and running requests add up."""

from hemiola.runtime.cache.eviction import Evictor, above
from hemiola.runtime.cache.lease import Lease
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tree import Entry, Tree


def audit(pages: PagePool, slots: SlotPool, evictor: Evictor, tree: Tree, leases: dict[int, Lease]) -> None:
    """Pages, slots, entries and running requests add up."""
    entries = list(tree.entries.values())
    slot_ids = set(leases)
    taken = [take.slot_id for lease in leases.values() for take in lease.taken]
    snapshots = [entry.slot_id for entry in entries if entry.slot_id]
    held = [*slot_ids, *taken, *snapshots]
    assert len(held) == len(set(held)), "a slot serves two ends"
    pages.audit(slot_ids)
    slots.audit(set(held))
    tree.audit()
    cached = [page_id for page_id in range(pages.num_pages) if pages.is_cached(page_id)]
    assert sorted(entry.page_id for entry in entries) == cached, "cached pages and entries differ"
    assert {entry.slot_id for entry in evictor.snapshots.entries} == set(snapshots)
    for entry in entries:
        _audit_entry(entry, pages, slots, evictor)
    for slot_id, lease in leases.items():
        _audit_lease(slot_id, lease, pages, tree)
    shared = {page_id for page_id, num_slots in enumerate(pages.refs) if num_slots > 1}
    stale = any(lease.stale for lease in leases.values())
    assert stale or shared <= set(cached), "two requests hold a page that either may write"


def _audit_entry(entry: Entry, pages: PagePool, slots: SlotPool, evictor: Evictor) -> None:
    refs = pages.refs
    behind = sum(refs[child.page_id] for child in entry.children)
    assert behind <= refs[entry.page_id], f"page {entry.page_id} is held less than those behind it"
    idle = refs[entry.page_id] == 0 and not entry.children
    evictor.audit(entry, idle)
    if not entry.slot_id:
        return
    assert slots.edge[entry.slot_id] == entry.edge, f"snapshot {entry.slot_id} is not of its edge"
    node = entry.parent
    while node is not None and node.parent is not None and not node.slot_id:
        node = node.parent
    assert above(entry) is node, f"snapshot {entry.slot_id} saves other work than it is counted for"


def _audit_lease(slot_id: int, lease: Lease, pages: PagePool, tree: Tree) -> None:
    for index, entry in enumerate(lease.path):
        assert tree.entries.get(entry.key) is entry, f"slot {slot_id} relies on an evicted page"
        assert entry.page_id == pages.table[slot_id, index], f"slot {slot_id} holds another page"
        assert entry.tokens == lease.chain.tokens(index), f"slot {slot_id} has other tokens than its page"
