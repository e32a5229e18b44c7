"""What scripts/gpu_storms.py does with seeds and minutes; a storm itself is in tests/gpu/test_graphs.py."""

import importlib
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

import pytest
from kit import gpu_engines
from kit.gpu_engines import FAMILIES, KINDS, in_turn

ROOT = Path(__file__).resolve().parent.parent


class FakeEngines:
    """Seed 4's engine does not open, seed 6's third storm finds something."""

    def __init__(self, folder: Path) -> None:
        pass

    def storms(self, seed: int, num_turns: int) -> Iterator[int]:
        assert seed != 4, "no engine"
        return (seed if seed != 6 or n < 2 else 1 // 0 for n in itertools.count())


@pytest.fixture
def storms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(gpu_engines, "Engines", FakeEngines)
    monkeypatch.setattr("signal.signal", lambda word, how: None)
    return importlib.import_module("gpu_storms")


def test_a_process_goes_from_seed_to_seed_whatever_fails_until_its_time_is_up(
    storms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, clock, tally = SimpleQueue(), itertools.count(), storms.Tally()
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    storms.work(tmp_path, 2, 2, 200, 60.0, found)
    said = [found.get() for _ in range(found.qsize())]
    for one in said:
        tally.count(one)
    seeds = [seed for seed, _ in itertools.groupby(one.seed for one in said)]
    assert seeds[:4] == [2, 4, 6, 8] and [one.seed for one in said if one.wrong] == [4, 6]
    assert "no engine" in said[1 + storms.AT_ONCE].wrong
    assert tally.failed == 2 and tally.engines == len(seeds) - 1
    assert tally.storms == len(said) - tally.failed - tally.engines and tally.steps > 2 * tally.storms
    assert next(clock) <= 60 - storms.LAST + 3


def test_a_process_that_opens_nothing_any_more_stops(
    storms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a lost GPU seeds failed by the thousand until the time was up, and buried the first."""
    monkeypatch.setattr(FakeEngines, "storms", lambda self, seed, turns: 1 // 0)
    clock, found = itertools.count(), SimpleQueue()
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    storms.work(tmp_path, 0, 1, 200, 60.0, found)
    assert [found.get().seed for _ in range(found.qsize())] == [0, 1, 2]


def test_seeds_in_a_row_leave_out_no_drafts_family_depth_pool_or_size() -> None:
    first = random.randrange(1000)
    print("seed", first)
    ten, thirty = range(first, first + 10), range(first, first + 30)
    assert len({(FAMILIES[seed % 2], KINDS[seed // 2 % 5], seed // 2 % 5) for seed in ten}) == 10
    assert len({(seed % 10, seed % 3) for seed in thirty}) == 30
    for name in ("rows", "tokens", "pages", "snapshots"):
        assert {in_turn(seed, name, [1, 3, 8]) for seed in range(first, first + 5)} == {1, 3, 8}
    assert len({tuple(in_turn(seed, name, [1, 3, 8]) for name in ("rows", "pages")) for seed in thirty}) > 4
