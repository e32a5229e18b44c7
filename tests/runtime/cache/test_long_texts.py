"""What is done to a cached text takes work in proportion to its pages. Counted, in lines of Python."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from kit.counted import lines_of_python

from hemiola.runtime.cache.disk import DiskTier
from hemiola.runtime.cache.disk_file import header_bytes
from hemiola.runtime.cache.eviction import Cost, Evictor
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import LOOK_AGAIN, PrefixCache
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tier import Tier

P = 4
FEW, MANY = 64, 256  # pages
COST = Cost(10, 0)


class Units:
    """Memory of the host, in which nothing is kept."""

    num_units, units_per_slot, unit_bytes = 10**4, 1, 16

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None: ...

    def get(self, unit: int) -> bytes:
        return bytes(self.unit_bytes)

    def settled(self) -> Callable[[], None]:
        return lambda: None


def a_cache(num_pages: int, folder: Path | None = None) -> PrefixCache:
    """Of an engine without recurrences, whose device holds one text of so many pages. folder: of its file."""
    sizes = 1 + num_pages, P, 4, 1 + num_pages
    units, disk = Units(), None
    host = Tier(COST, P, units)
    if folder is not None:
        room = num_pages * (header_bytes(P) + units.unit_bytes)
        disk = DiskTier(folder / "file", room, "form", COST, P, host, units)
    pools = PagePool(*sizes), SlotPool(8, P), Evictor(COST, P)
    return PrefixCache(*pools, host=host, disk=disk, content=units)


def serve(prefix: PrefixCache, num_pages: int, seed: int, chose: bool = True) -> None:
    """A text of so many pages is computed, and is cached from then on."""
    ids = np.random.default_rng(seed).integers(0, 999, num_pages * P, np.int32)
    prefix.tick()
    start = prefix.admit(prefix.chain(ids), len(ids) - 1, may_hit=False)
    assert start is not None
    prefix.commit(start.slot_id, len(ids), len(ids), chose=chose)
    prefix.release(start.slot_id, donate=True)


def flushed(num_pages: int, folder: Path) -> Callable[[], object]:
    prefix = a_cache(num_pages)
    serve(prefix, num_pages, 1)
    return prefix.flush


def evicted(num_pages: int, folder: Path) -> Callable[[], object]:
    prefix = a_cache(num_pages)
    serve(prefix, num_pages, 1)
    return lambda: serve(prefix, num_pages, 2)


def evicted_again(num_pages: int, folder: Path) -> Callable[[], object]:
    """The host has it already."""
    prefix = a_cache(num_pages)
    for seed in (1, 2, 1):
        serve(prefix, num_pages, seed)
    return lambda: serve(prefix, num_pages, 2)


def given_up_to_a_full_host(num_pages: int, folder: Path) -> Callable[[], object]:
    """Which has no room for half of it."""
    prefix = a_cache(num_pages)
    assert prefix.host is not None
    prefix.host.mover.num_units = num_pages // 2
    prefix.host._start()
    serve(prefix, num_pages, 1)
    return lambda: serve(prefix, num_pages, 2)


def saved(num_pages: int, folder: Path) -> Callable[[], object]:
    prefix = a_cache(num_pages, folder)
    serve(prefix, num_pages, 1)
    return prefix.save


def opened(num_pages: int, folder: Path) -> Callable[[], object]:
    """With what an engine before has left in its file."""
    before = a_cache(num_pages, folder)
    serve(before, num_pages, 1)
    before.save()
    assert before.disk is not None
    before.disk.close()

    def work() -> None:
        disk = a_cache(num_pages, folder).disk
        assert disk is not None and disk.tier.num_entries == num_pages
        disk.close()

    return work


@pytest.mark.parametrize("act", [flushed, evicted, evicted_again, given_up_to_a_full_host, saved, opened])
def test_a_text_four_times_as_long_takes_sixteen_times_the_work(
    act: Callable[[int, Path], Callable[[], object]], tmp_path: Path
) -> None:
    """In the loop's thread: 65,536 tokens in pages of 16 took 27 seconds to flush, 2 to give up."""
    few, many = (lines_of_python(act(num_pages, tmp_path / str(num_pages))) for num_pages in (FEW, MANY))
    assert many < 1.25 * MANY / FEW * few


def test_a_flush_asks_the_threads_of_the_file_for_each_of_its_units(tmp_path: Path) -> None:
    """A million tasks took hundreds of megabytes, and Python's lock from the steps."""
    num_units = 3000
    prefix = a_cache(num_units, tmp_path)
    serve(prefix, FEW, 1)
    prefix.save()
    disk = prefix.disk
    assert disk is not None and disk.tier.num_entries == FEW
    share, asked = disk._worker.share, []
    disk._worker.share = lambda do, pieces: asked.extend(pieces) or share(do, pieces)
    prefix.flush()
    disk.close()
    assert len(asked) < num_units / 100
    disk = a_cache(num_units, tmp_path).disk
    assert disk is not None and disk.tier.num_entries == 0
    disk.close()


def test_pages_of_which_nobody_knows_that_they_hold_no_nan_go_to_the_host() -> None:
    """A page that is known to stands behind one that is not, too."""
    prefix = a_cache(FEW)
    serve(prefix, FEW, 1, chose=False)
    last = max((entry for _, entry in prefix.contents()), key=lambda entry: entry.edge)
    last.proven = True
    for number in (2, 3):
        serve(prefix, FEW, number)
        assert prefix.host is not None and prefix.host.num_entries == (number - 2) * FEW


def test_a_long_text_that_waits_for_pages_is_looked_up_in_every_step() -> None:
    """For its 262,144 tokens in pages of 64, that took each step of all others 2 ms."""
    prefix = a_cache(MANY + 9)
    serve(prefix, MANY, 1)
    chain = prefix.chain(np.random.default_rng(1).integers(0, 999, MANY * P, np.int32))
    other = prefix.admit(prefix.chain(np.zeros(9 * P, np.int32)), 8 * P)
    assert other is not None

    def wait() -> None:
        for _ in range(32):
            prefix.tick()
            assert prefix.admit(chain, MANY * P, spare_pages=1) is None

    prefix.tick()
    alone = lines_of_python(lambda: prefix.admit(chain, MANY * P, spare_pages=1))
    assert lines_of_python(wait) < 6 * alone
    prefix.release(other.slot_id)
    assert prefix.admit(chain, MANY * P, spare_pages=1) is not None, "at once"


def test_who_waits_for_pages_does_not_see_that_others_have_published_them() -> None:
    """No page comes back, but what it still needs becomes less."""
    prefix = a_cache(8)
    prefix.tick()
    ids = np.arange(6 * P, dtype=np.int32)
    first = prefix.admit(prefix.chain(ids[: 5 * P]), 5 * P - 1)
    assert first is not None
    chain = prefix.chain(ids)
    assert prefix.admit(chain, 6 * P - 1, spare_pages=1) is None
    prefix.commit(first.slot_id, 4 * P, 5 * P - 1)
    for _ in range(LOOK_AGAIN):
        prefix.tick()
        found = prefix.admit(chain, 6 * P - 1, spare_pages=1)
        if found is not None:
            break
    assert found is not None and found.hit_len == 4 * P
