"""The clock that does not count pauses of the process."""

import pytest
from kit.served import until

from hemiola.runtime.running_time import TICK, RunningTime


def test_the_clock_counts_all_time_but_pauses() -> None:
    now = [5.0]
    clock = RunningTime()
    clock.end()
    clock.wall = lambda: now[0]
    clock._last = 0.0, 5.0
    for seconds in (TICK, TICK, 2 * TICK):
        now[0] += seconds
        clock.tick()
    now[0] += TICK / 2
    assert clock() == pytest.approx(4.5 * TICK)
    now[0] += 3600
    assert clock() == pytest.approx(6 * TICK)
    clock.tick()
    assert clock() == pytest.approx(6 * TICK)
    real = RunningTime()
    until(lambda: real() > 2 * TICK)  # it ticks
    real.end()


def test_the_clock_goes_back_where_the_thread_that_ticks_is_held_up() -> None:
    """It looked at the wall's clock twice for a tick; what passed in between had been seen, and was lost."""
    now = [5.0]

    def wall() -> float:
        now[0] += 0.1
        return now[0]

    clock = RunningTime()
    clock.end()
    clock.wall = wall
    clock._last = 0.0, 5.0
    for _ in range(10):
        clock.tick()
    assert clock() == pytest.approx(now[0] - 5.0)
