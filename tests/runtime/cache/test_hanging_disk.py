"""A disk whose reads or writes do not return: requests go on, the tier is switched off, the engine ends."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from kit.fake_session import FakeSession, oracle, resolved
from kit.hand import Hand
from kit.served import until

from hemiola.runtime.cache import disk, prefix
from hemiola.runtime.cache.disk import LIMIT_S, DiskTier
from hemiola.runtime.cache.disk_file import header_bytes
from hemiola.runtime.running_time import TICK, RunningTime
from hemiola.runtime.schedule import loop as loops

TEXT = [3 * n % 97 for n in range(40)]
READ = 4 + 3  # units: pages up to 32, the edge of its snapshot, and the snapshot
Make = Callable[..., Hand]


class Gate:
    """Calls of os.preadv and os.pwrite on the file wait here while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = threading.Semaphore(0)
        self.num_waiting = 0
        self.is_shut = False
        for name in ("preadv", "pwrite"):
            monkeypatch.setattr(disk.os, name, self._held(getattr(disk.os, name)))

    def _held(self, call: Callable[..., object]) -> Callable[..., object]:
        def waits(*given: object) -> object:
            if self.is_shut and threading.current_thread().name.startswith("hemiola-disk"):
                self.num_waiting += 1
                assert self._turns.acquire(timeout=600)
            return call(*given)

        return waits

    def let_through(self, num: int) -> None:
        self._turns.release(num)

    def open(self) -> None:
        self.is_shut = False
        self._turns.release(10**6)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    monkeypatch.setattr(loops, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(disk, "READERS", 4)  # a read has more pieces
    yield made
    made.open()


@pytest.fixture
def open_hand(make_hand: Make, tmp_path: Path) -> Callable[[], Hand]:
    def make() -> Hand:
        changes = {
            "host_cache_bytes": 300,
            "disk_cache_dir": str(tmp_path),
            "disk_cache_bytes": 200 * (header_bytes(8) + 1024),
        }
        sizes = {"prefix_cache": True, "num_pages": 12, "num_slots": 4, "max_rows": 2}
        return make_hand(session=FakeSession(resolved(**sizes, **changes)))

    return make


def tier_of(hand: Hand) -> DiskTier:
    found = hand.loop.scheduler.prefix.disk
    assert found is not None
    return found


def end(hand: Hand) -> None:
    """As an engine ends."""
    hand.loop.scheduler.prefix.save()
    tier_of(hand).close()


def ask(hand: Hand, text: list[int]) -> int:
    """The answer is the oracle's; returns where it began."""
    request_id = hand.submit(text, max_tokens=4)
    hand.run()
    assert hand.token_ids(request_id) == oracle(text, 4)
    return hand.requests[request_id - 1].metrics.cached_tokens


@pytest.fixture
def filled(open_hand: Callable[[], Hand], gate: Gate) -> Hand:
    return filled_with(open_hand, TEXT)


def filled_with(open_hand: Callable[[], Hand], *texts: list[int]) -> Hand:
    """An engine whose file has these texts, with a clock that stands still."""
    hand = open_hand()
    for text in texts:
        ask(hand, text)
    end(hand)
    hand = open_hand()
    hand.now = [0.0]
    tier_of(hand)._worker.clock = lambda: hand.now[0]
    return hand


def test_requests_wait_for_ever_for_a_read_that_hangs(
    filled: Hand, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    hand, tier, gate.is_shut = filled, tier_of(filled), True
    hand.watch_cache()  # each audit: a router counts nothing of a disk that is off
    waiting = [hand.submit([*TEXT, n], max_tokens=4) for n in range(2)]
    hand.loop._read_inbox()
    until(lambda: gate.num_waiting)
    hand.now[0] = LIMIT_S - 1
    assert not tier.is_overdue and len(hand.loop.scheduler.fetching) == 2
    other = [7] * 12
    assert ask_beside(hand, other) == oracle(other, 4), "others do not wait"
    hand.now[0] = LIMIT_S + 1
    hand.run()
    for n, request_id in enumerate(waiting):
        assert hand.token_ids(request_id) == oracle([*TEXT, n], 4)
    assert hand.requests[0].metrics.cached_tokens == 0
    assert not tier.is_on and not tier.use.is_on
    assert ask(hand, [*TEXT, 9]) == 40, "from memory"
    hand.now[0] = 100 * LIMIT_S
    for n in range(6):
        ask(hand, [n] * 40)
    assert caplog.text.count("nothing was read or written for 10 s; the disk cache is off") == 1
    assert len(caplog.records) == 1
    end(hand)
    gate.open()
    tier._worker._thread.join(60)
    hand.loop.scheduler.prefix.collect()
    hand.audit()
    assert tier._host.num_free + num_used(tier) == tier._host.mover.num_units, "units stay lent"


def test_a_process_that_was_stopped_during_a_read_takes_the_disk_for_one_that_hangs(
    filled: Hand, gate: Gate
) -> None:
    """And the tier was off for good, or the disk seemed slow for hours."""
    hand, tier, gate.is_shut = filled, tier_of(filled), True
    clock = tier._worker.clock = RunningTime()
    clock.end()
    clock.wall = lambda: hand.now[0]
    clock._last = 0.0, 0.0
    request_id = hand.submit(TEXT, max_tokens=4)
    hand.loop._read_inbox()
    until(lambda: gate.num_waiting)
    hand.now[0] = 1000 * LIMIT_S
    assert not tier.is_overdue
    hand.loop.scheduler.prefix.collect()
    assert tier.is_on and hand.loop.scheduler.fetching
    gate.open()
    until(lambda: not tier._done.empty())
    hand.run()
    assert hand.token_ids(request_id) == oracle(TEXT, 4)
    assert hand.requests[0].metrics.cached_tokens == 32
    assert tier.reading.seconds(READ) == 2 * TICK
    end(hand)


@pytest.mark.parametrize("forget", ["flush", "withdraw"])
def test_requests_wait_for_ever_for_a_read_that_hangs_and_whose_text_was_forgotten(
    filled: Hand, gate: Gate, forget: str
) -> None:
    hand, tier, gate.is_shut = filled, tier_of(filled), True
    request_id = hand.submit(TEXT, max_tokens=4)
    hand.loop._read_inbox()
    until(lambda: gate.num_waiting)
    if forget == "flush":
        hand.loop.scheduler.prefix.flush()
    else:
        tier.withdraw(hand.requests[0].chain)
    hand.now[0] = LIMIT_S + 1
    assert tier.is_overdue
    hand.loop.scheduler.prefix.collect()
    assert not hand.loop.scheduler.fetching, "it waits for ever"
    hand.run()
    assert hand.token_ids(request_id) == oracle(TEXT, 4)
    end(hand)


def test_who_came_late_waits_for_a_disk_that_is_off(open_hand: Callable[[], Hand], gate: Gate) -> None:
    """Until it had waited as long as the first, for which the disk was switched off."""
    late = [5 * n % 97 for n in range(40)]
    hand = filled_with(open_hand, TEXT, late)
    tier, gate.is_shut = tier_of(hand), True
    for text, seconds in ((TEXT, 0), (late, LIMIT_S - 1)):
        hand.now[0] = seconds
        hand.submit(text, max_tokens=4)
        hand.loop._read_inbox()
        until(lambda: gate.num_waiting == 4)
    assert len(hand.loop.scheduler.fetching) == len(tier._awaited) == 2
    hand.now[0] = LIMIT_S + 1
    hand.loop.scheduler.prefix.collect()
    assert not tier.is_on and not hand.loop.scheduler.fetching
    hand.run()
    end(hand)


def test_a_slow_disk_makes_the_list_of_what_it_is_to_write_ever_longer(
    open_hand: Callable[[], Hand], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host's memory, that is lent until it is written."""
    monkeypatch.setattr(disk, "MOST_WAITING", 20)
    hand, gate.is_shut = open_hand(), True
    tier = tier_of(hand)
    tier._worker.clock = lambda: 0.0
    most = 5 + tier._pieces.units_per_slot  # of a text here
    for n in range(12):
        ask(hand, [n] * 40)
        assert tier._num_waiting <= 20 + most
    assert tier._num_waiting > 20
    gate.open()
    end(hand)
    hand.audit()


def test_who_packs_a_prefix_waits_for_ever_for_a_read_that_hangs(filled: Hand, gate: Gate) -> None:
    hand, prefix, gate.is_shut = filled, filled.loop.scheduler.prefix, True
    was_read = threading.Event()
    ids = np.array(TEXT, np.int32)
    assert prefix.fetch(prefix.chain(ids), len(ids) + 1, was_read.set)
    until(lambda: gate.num_waiting)
    assert hand.loop._idle(), "an engine that does nothing does not look again"
    hand.now[0] = LIMIT_S + 1
    hand.loop._read_inbox()
    assert was_read.is_set()
    end(hand)


def num_used(tier: DiskTier) -> int:
    return sum(1 + len(units) for _, _, units in tier._host.contents())


def ask_beside(hand: Hand, text: list[int]) -> list[int]:
    """While others are read for."""
    request_id = hand.submit(text, max_tokens=4)
    while not hand.ended(request_id):
        hand.turn()
    return hand.token_ids(request_id)


def test_requests_wait_for_ever_for_a_read_that_is_slow(
    filled: Hand, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """It moves, so the tier stays on, and later requests find what was read."""
    hand, tier, gate.is_shut = filled, tier_of(filled), True
    request_id = hand.submit(TEXT, max_tokens=4)
    hand.loop._read_inbox()
    until(lambda: gate.num_waiting == disk.READERS)
    hand.now[0] = LIMIT_S - 4
    gate.let_through(1)
    until(lambda: tier._worker._moved == LIMIT_S - 4)
    hand.now[0] = LIMIT_S + 1
    hand.run()
    assert hand.token_ids(request_id) == oracle(TEXT, 4)
    assert hand.requests[0].metrics.cached_tokens == 0 and tier.is_on and not caplog.records
    gate.open()
    until(lambda: not tier._done.empty())
    hand.loop.scheduler.prefix.collect()
    assert tier.tier.statistics.num_hits == 1
    end(hand)


def test_a_write_that_hangs_holds_up_requests(
    open_hand: Callable[[], Hand], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    hand, now = open_hand(), [0.0]
    tier, gate.is_shut = tier_of(hand), True
    tier._worker.clock = lambda: now[0]
    for n in range(8):
        ask(hand, [n] * 40)
    until(lambda: gate.num_waiting)
    now[0] = LIMIT_S + 1
    ask(hand, [50] * 40)
    assert not tier.is_on and len(caplog.records) == 1
    num_waiting = tier._num_waiting
    for n in range(8):
        ask(hand, [n + 60] * 40)
    assert tier._num_waiting == num_waiting, "nothing more is asked of it"
    end(hand)


def test_an_engine_does_not_end_while_its_disk_hangs(
    open_hand: Callable[[], Hand],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(disk, "LIMIT_S", 0.05)
    monkeypatch.setattr(prefix, "SAVE_SECONDS", 0.05)
    hand = open_hand()
    tier = tier_of(hand)
    ask(hand, TEXT)
    gate.is_shut = True
    end(hand)
    assert tier._worker._thread.is_alive() and not tier.is_on and len(caplog.records) == 1
    gate.open()
    tier._worker._thread.join(60)
    again = open_hand()  # the thread has closed the file
    end(again)


def test_a_withdrawn_text_is_in_the_file_when_a_disk_that_hung_moves_again(filled: Hand, gate: Gate) -> None:
    hand, tier, gate.is_shut = filled, tier_of(filled), True
    request_id = hand.submit(TEXT, max_tokens=4)
    hand.loop._read_inbox()
    until(lambda: gate.num_waiting)
    hand.now[0] = LIMIT_S + 1
    hand.run()
    assert hand.ended(request_id) and not tier.is_on
    tier.withdraw(hand.requests[0].chain)
    tier._worker._tasks.put(None)
    gate.open()
    tier._worker._thread.join(60)
    assert disk.MAGIC.encode() not in Path(tier._path).read_bytes()
