"""A prefix is read from the file only where that is not much slower than computing it again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.fake_session import FakeSession, oracle, resolved
from kit.hand import Hand

from hemiola.runtime.cache.disk import PATIENCE_S, RETRY, DiskTier
from hemiola.runtime.cache.disk_file import header_bytes
from hemiola.runtime.cache.rate import FADE, Rate

TEXT = [3 * n % 97 for n in range(40)]
READ = 4 + 3  # units: pages up to 32, the edge of its snapshot, and the snapshot


def test_a_rate_is_what_was_measured_and_forgets() -> None:
    rate = Rate()
    assert rate.seconds(5) is None
    rate.add(10, 20.0)
    assert rate.seconds(5) == 10.0
    rate.add(10, 0.0)
    assert rate.seconds(1) == pytest.approx(FADE * 20 / (FADE * 10 + 10))
    for _ in range(200):
        rate.add(10, 10.0)
    assert rate.seconds(1) == pytest.approx(1.0)


class Tried:
    """An engine whose file has TEXT, and that measures nothing by itself."""

    def __init__(self, make_hand: Callable[..., Hand], folder: Path) -> None:
        self._make_hand, self._folder = make_hand, folder
        self.open()
        self.ask(TEXT)
        self.close()
        self.open()

    def open(self) -> None:
        changes = {"host_cache_bytes": 60, "disk_cache_dir": str(self._folder)}
        changes |= {"disk_cache_bytes": 200 * (header_bytes(8) + 1024), "prefix_cache": True, "max_rows": 2}
        session = FakeSession(resolved(num_pages=12, num_slots=4, **changes))
        self.hand = self._make_hand(session=session)
        self.prefix = self.hand.loop.scheduler.prefix
        assert self.prefix.disk is not None
        self.disk: DiskTier = self.prefix.disk
        self.disk.patience_s = PATIENCE_S
        self.prefix.computed = lambda *measured: None
        self.disk.reading.add = lambda *measured: None

    def close(self) -> None:
        self.prefix.save()
        self.disk.close()

    def measured(self, token_s: float, unit_s: float) -> None:
        Rate.add(self.disk.computing, 1, token_s)
        Rate.add(self.disk.reading, 1, unit_s)

    def ask(self, text: list[int]) -> int:
        """The answer is the oracle's; returns where it began."""
        request_id = self.hand.submit(text, max_tokens=4)
        self.hand.run()
        assert self.hand.token_ids(request_id) == oracle(text, 4)
        return self.hand.requests[request_id - 1].metrics.cached_tokens


@pytest.fixture
def tried(make_hand: Callable[..., Hand], tmp_path: Path) -> Tried:
    return Tried(make_hand, tmp_path)


SLOWEST = (32 * 0.01 + PATIENCE_S) / READ  # of a unit, where computing takes 10 ms a token


@pytest.mark.parametrize(
    ("unit_s", "begun"), [(SLOWEST * 0.99, 32), (SLOWEST * 1.01, 0)], ids=["fast enough", "too slow"]
)
def test_a_slow_disk_is_read_although_computing_is_faster(tried: Tried, unit_s: float, begun: int) -> None:
    tried.measured(0.01, unit_s)
    assert tried.ask(TEXT) == begun
    assert tried.disk.tier.statistics.num_declined == (begun == 0)
    assert tried.disk.tier.statistics.num_hits == (begun > 0)
    tried.close()


def test_before_anything_was_measured_the_file_is_read(tried: Tried) -> None:
    Rate.add(tried.disk.reading, 1, 1000.0)
    assert tried.ask(TEXT) == 32, "what computing takes is not known"
    tried.close()


def test_what_nobody_would_read_is_written(tried: Tried) -> None:
    tried.measured(0.01, 1.0)
    for n in range(6):
        tried.ask([n] * 40)
    statistics = tried.disk.tier.statistics
    assert statistics.saved_units == 0 and statistics.num_declined > 0
    tried.close()


def test_a_disk_that_became_faster_is_never_noticed(tried: Tried) -> None:
    tried.measured(0.01, 1.0)
    found = [tried.disk._pays(32.0, READ) for _ in range(2 * RETRY)]
    assert [n for n, pays in enumerate(found, 1) if pays] == [RETRY, 2 * RETRY]
    tried.close()


def test_steps_that_read_prompts_say_what_a_token_takes(
    make_hand: Callable[..., Hand], tmp_path: Path
) -> None:
    """And no others: a step that decodes takes longer for each of its tokens."""
    tried = Tried(make_hand, tmp_path)
    seen: list[int] = []
    tried.prefix.computed = lambda num_tokens, seconds: seen.append(num_tokens)
    tried.ask([5] * 30)
    assert sum(seen) == 30 and len(tried.hand.loop.storage.shapes) > len(seen)
    tried.close()
