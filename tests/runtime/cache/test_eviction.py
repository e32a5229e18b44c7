"""What reuse teaches, and whom it costs the place."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.runtime.cache import eviction
from hemiola.runtime.cache.eviction import Bag, Cost, Evictor, Oldest, Reuse, above
from hemiola.runtime.cache.tree import Entry, ReuseGroup

CHAT = ReuseGroup("decode", 0, 0)


def node(parent: Entry | None, edge: int, used: int = 0) -> Entry:
    entry = Entry(b"", parent, b"", edge, edge, 0, used=used)
    if parent is not None:
        parent.children.add(entry)
    return entry


# Reuse.


def test_without_experience_the_younger_is_worth_more() -> None:
    reuse = Reuse()
    indices = [reuse.index(CHAT, age) for age in (0, 1, 2, 4, 8, 64, 1000, 10**6)]
    assert indices == sorted(indices, reverse=True) and indices[0] > 50 * indices[6] > 0


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=40))
def test_all_time_is_counted_once(spans: list[tuple[int, int, bool]]) -> None:
    reuse = Reuse()
    before = sum(reuse._all_time)
    for a, b, used in spans:
        reuse.record(CHAT, min(a, b), max(a, b), used)
    assert sum(reuse._time.get(CHAT, [])) == pytest.approx(sum(abs(a - b) + 0.5 for a, b, _ in spans))
    assert sum(reuse._all_time) - before == pytest.approx(sum(reuse._time.get(CHAT, [])))
    assert sum(reuse._uses.get(CHAT, [])) == sum(used for *_, used in spans)


@pytest.mark.parametrize("seed", range(10))
def test_the_index_is_the_best_rate_of_all_horizons(seed: int) -> None:
    """In steps of a hundredth of the way through each bin."""
    choose = random.Random(seed)
    reuse = Reuse()
    for _ in range(choose.randint(1, 300)):
        reuse.record(CHAT, 0, choose.choice([3, 20, 200]) + choose.randint(0, 9), choose.random() < 0.5)
    reuse._indices.clear()
    rates = reuse._rates(CHAT)
    for first in range(8):
        alive, uses, time, best = 1.0, 0.0, 0.0, 0.0
        for rate, width in zip(rates[first:], eviction.WIDTHS[first:], strict=True):
            for _ in range(100):
                gone = alive * (1 - math.exp(-rate * width / 100))
                uses, time, alive = uses + gone, time + (alive - gone / 2) * width / 100, alive - gone
            best = max(best, uses / time)
        age = sum(eviction.WIDTHS[:first])
        assert reuse.index(CHAT, age) == pytest.approx(best, rel=0.02), f"bin {first}"


def test_bins_cover_all_ages_without_gap() -> None:
    starts = [sum(eviction.WIDTHS[:number]) for number in range(eviction.BINS)]
    for number, start in enumerate(starts):
        assert eviction._bin(start) == number
        assert number == 0 or eviction._bin(start - 1) == number - 1
    assert eviction._bin(10**9) == eviction.BINS - 1


# Sets of entries.


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=300))
def test_a_bag_is_a_set(acts: list[tuple[int, bool]]) -> None:
    bag, entries, held = Bag(), [node(None, n) for n in range(10)], set()
    for number, add in acts:
        if add:
            bag.add(entries[number])
            held.add(entries[number])
        else:
            bag.remove(entries[number])
            held.discard(entries[number])
        assert set(bag.entries) == held and len(bag.entries) == len(held)
        assert {entry for entry in entries if entry in bag} == held


def test_a_bag_shows_everybody_in_time_and_a_small_one_at_once() -> None:
    bag, entries = Bag(), [node(None, n) for n in range(4 * eviction.SAMPLE)]
    for entry in entries[: eviction.SAMPLE]:
        bag.add(entry)
    assert set(bag.sample()) == set(entries[: eviction.SAMPLE])
    for entry in entries:
        bag.add(entry)
    assert len(bag.sample()) == eviction.SAMPLE
    assert {entry for _ in range(40) for entry in bag.sample()} == set(entries)


@pytest.mark.parametrize("seed", range(5))
def test_oldest_finds_the_least_recently_used(seed: int) -> None:
    choose = random.Random(seed)
    oldest, entries, held = Oldest(), [node(None, n) for n in range(5)], set()
    for _ in range(1000):
        entry = choose.choice(entries)
        if entry not in held:
            entry.used = choose.randint(0, 20)
            oldest.add(entry)
            held.add(entry)
        else:
            oldest.remove(entry)
            held.discard(entry)
        first = oldest.first()
        assert (first.used if first else None) == min((e.used for e in held), default=None)
        assert first is None or first in held


def test_the_heap_does_not_grow_with_every_use() -> None:
    oldest, entry = Oldest(), node(None, 0)
    for used in range(10_000):
        oldest.remove(entry)
        entry.used = used
        oldest.add(entry)
    assert len(oldest._heap) < 200


# Evictor.


def make(pair: float = 0.0) -> Evictor:
    return Evictor(Cost(page_bytes=10, slot_bytes=40, token=1.0, pair=pair), page_len=4)


def test_gain_is_what_the_snapshot_above_does_not_save() -> None:
    evictor, root = make(pair=0.5), node(None, 0)
    first = node(root, 4)
    middle = node(first, 8)
    last = node(middle, 12)
    evictor.attach(last, 3, "prompt")
    assert evictor.gain(last) == 12 + 0.25 * 144
    evictor.attach(first, 1, "junction")
    assert evictor.gain(last) == (12 + 36) - (4 + 4) and evictor.gain(first) == 8
    evictor.attach(middle, 2, "interval")
    assert above(last) is middle
    evictor.detach(middle)
    assert above(last) is first
    evictor.detach(first)
    assert above(last) is root and evictor.gain(last) == 48
    assert evictor.promise("prompt", 4, 12) > 0


def test_an_age_is_recorded_once_in_whatever_groups_it_passed() -> None:
    evictor, root = make(), node(None, 0)
    entry = node(root, 4)
    evictor.attach(entry, 1, "decode")
    evictor.clock += 10
    node(entry, 8)
    evictor.change(entry)
    assert entry.group == ReuseGroup("decode", 1, 0)
    evictor.clock += 30
    evictor.use(entry)
    assert entry.group == ReuseGroup("decode", 1, 1) and entry.used == 40
    time = {group: sum(spent) for group, spent in evictor.reuse._time.items()}
    assert time == {ReuseGroup("decode", 0, 0): 10.5, ReuseGroup("decode", 1, 0): 30.5}
    assert sum(evictor.reuse._uses[ReuseGroup("decode", 1, 0)]) == 1


@pytest.mark.parametrize(("kind", "below"), [("junction", 2), ("prompt", 0), ("decode", 0)])
def test_a_promise_is_what_such_snapshots_turned_out_to_be_worth(kind: str, below: int) -> None:
    evictor = make()
    for other in range(3):
        for number in range(64):
            evictor.reuse.record(ReuseGroup(kind, other, 0), 0, 10 + number, used=other == below)
    fresh = evictor.reuse.index(ReuseGroup(kind, below, 0), 0)
    assert evictor.promise(kind, 4, 20) == fresh * 16
    assert fresh > 2 * max(
        evictor.reuse.index(ReuseGroup(kind, other, 0), 0) for other in {0, 1, 2} - {below}
    )


@pytest.mark.parametrize("seed", range(5))
def test_above_is_right_whatever_comes_and_goes(seed: int) -> None:
    choose = random.Random(seed)
    evictor = make()
    nodes = [node(None, 0)]
    for _ in range(60):
        parent = choose.choice(nodes[-8:])
        nodes.append(node(parent, parent.edge + 4))
    for _ in range(400):
        entry = choose.choice(nodes[1:])
        if entry.slot_id:
            evictor.detach(entry)
        else:
            evictor.attach(entry, 1, "prompt")
        for other in choose.sample(nodes[1:], 10):
            if other.slot_id:
                true = other.parent
                while true is not nodes[0] and not true.slot_id:
                    true = true.parent
                assert above(other) is true, f"seed {seed}"


def test_the_victim_is_the_least_of_all_if_few() -> None:
    evictor, root = make(), node(None, 0)
    entries = [node(root, 4 * edge) for edge in (5, 2, 9)]
    for slot_id, entry in enumerate(entries, 1):
        evictor.attach(entry, slot_id, "prompt")
    victim = evictor.snapshot_victim(step=1)
    assert victim is not None and victim.entry is entries[1] and victim.value == evictor.value(entries[1])
    entries[1].pinned = 1
    victim = evictor.snapshot_victim(step=1)
    assert victim is not None and victim.entry is entries[0]
    for entry in entries:
        entry.pinned = 1
    assert evictor.snapshot_victim(step=1) is None


def test_one_unpinned_snapshot_among_many_is_found() -> None:
    evictor, root = make(), node(None, 0)
    entries = [node(root, 4) for _ in range(20 * eviction.SAMPLE)]
    for entry in entries:
        evictor.attach(entry, 1, "prompt")
        entry.pinned = 7
    entries[3].pinned = 6
    victim = evictor.snapshot_victim(step=7)
    assert victim is not None and victim.entry is entries[3]


def test_a_prefix_that_everybody_starts_from_outlives_much_noise() -> None:
    """Under LRU it would go: it is always older than what came since."""
    evictor, root = make(), node(None, 0)
    common = node(root, 8)
    evictor.attach(common, 1, "junction")
    held: list[Entry] = []
    for number in range(400):
        evictor.clock += 1
        if number % 20 == 0:
            evictor.use(common)
        entry = node(root, 8)
        evictor.attach(entry, 2, "prompt")
        held.append(entry)
        if len(held) > 10:
            victim = evictor.snapshot_victim(step=-2)
            assert victim is not None
            evictor.detach(victim.entry)
            assert victim.entry is not common or number < 60, f"gone after {number}"
            if victim.entry is common:
                evictor.attach(common, 1, "junction")
            else:
                held.remove(victim.entry)


def test_pages_that_save_nothing_go_first_the_oldest_of_them_before_others() -> None:
    evictor, root = make(), node(None, 0)
    kept, old, young = node(root, 4), node(root, 4, used=3), node(root, 4, used=5)
    evictor.attach(kept, 1, "prompt")
    for entry in (kept, young, old):
        evictor.idle(entry)
    for expected in (old, young, kept):
        assert evictor.page_victim() is expected
        evictor.audit(expected, idle=True)
        evictor.busy(expected)
    assert evictor.page_victim() is None


def test_a_page_whose_snapshot_went_saves_nothing() -> None:
    evictor, root = make(), node(None, 0)
    first, second = node(root, 400), node(root, 4)
    for entry in (first, second):
        evictor.attach(entry, 1, "prompt")
        evictor.idle(entry)
    assert evictor.page_victim() is second
    evictor.detach(first)
    assert evictor.page_victim() is first
    evictor.audit(first, idle=True)


# Ages.


def test_an_age_is_counted_from_the_last_use() -> None:
    evictor, root = make(), node(None, 0)
    entry = node(root, 4)
    evictor.clock = 100
    evictor.attach(entry, 1, "prompt")
    for pause in (10, 3):
        evictor.clock += pause
        evictor.use(entry)
    time = {group.uses: sum(spent) for group, spent in evictor.reuse._time.items()}
    assert time == {0: 10.5, 1: 3.5}


def test_a_new_snapshot_of_an_old_page_is_young() -> None:
    """It saves half of what the old one saves, which nobody has used for long."""
    evictor, root = make(), node(None, 0)
    old, young = node(root, 16), node(root, 8)
    young.num_uses = 2  # those of an earlier snapshot
    evictor.attach(old, 1, "prompt")
    evictor.clock += 64
    evictor.attach(young, 2, "prompt")
    victim = evictor.snapshot_victim(step=1)
    assert victim is not None and victim.entry is old
    assert young.group == ("prompt", 0, 0)
