"""What a seed gives, and that it gives it again."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
from kit.refused import code_and_field

from hemiola.runtime.bench import workloads
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.errors import Refused

IDS = workloads.random_ids(50)


def prompts(sessions: list[workloads.Turns]) -> list[list[int]]:
    return [turn.ids for session in sessions for turn in session]


def test_without_a_rate_everything_arrives_at_once() -> None:
    assert workloads.arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_infinite_burstiness_is_even() -> None:
    assert workloads.arrivals(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [1e-6, 0.3, 1.0, 4.0])
def test_last_arrival_is_at_count_over_rate(burstiness: float) -> None:
    times = workloads.arrivals(200, 8.0, burstiness, 3)
    assert times[-1] == pytest.approx(25.0) and times == sorted(times) and times[0] >= 0


def test_gaps_that_all_round_to_0_are_still_a_schedule() -> None:
    times = workloads.arrivals(3, 2.0, 1e-9, 0)
    assert times[-1] == pytest.approx(1.5) and all(0 <= time <= 1.5 for time in times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_does(burstiness: float) -> None:
    gaps = np.diff(workloads.arrivals(20_000, 1.0, burstiness, 1))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_seed_decides_arrivals_and_prompts() -> None:
    assert workloads.arrivals(9, 1.0, 1.0, 5) == workloads.arrivals(9, 1.0, 1.0, 5)
    assert workloads.arrivals(9, 1.0, 1.0, 5) != workloads.arrivals(9, 1.0, 1.0, 6)
    for make in (workloads.random_sessions, workloads.multi_turn_sessions):
        first, again, other = (make(BenchOptions(seed=seed), 6, IDS) for seed in (5, 5, 6))
        assert first == again and prompts(first) != prompts(other)


def test_random_lengths_reach_both_ends_of_the_range() -> None:
    options = BenchOptions(input_len=10, output_len=4, random_range_ratio=0.5)
    turns = [session[0] for session in workloads.random_sessions(options, 400, IDS)]
    assert {len(turn.ids) for turn in turns} == set(range(5, 16))
    assert {turn.max_tokens for turn in turns} == set(range(2, 7))


def test_a_length_is_never_0() -> None:
    options = BenchOptions(input_len=1, output_len=1, random_range_ratio=0.99)
    turns = [session[0] for session in workloads.random_sessions(options, 100, IDS)]
    assert {len(turn.ids) for turn in turns} == {1, 2} == {turn.max_tokens for turn in turns}


def test_random_ids_cover_the_vocabulary() -> None:
    options = BenchOptions(input_len=100)
    assert set(chain(*prompts(workloads.random_sessions(options, 40, IDS)))) == set(range(50))


def test_slices_are_pieces_of_the_text_and_go_round() -> None:
    draw = workloads.slices(range(100, 107))
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = draw(rng, 17)
        assert len(ids) == 17 and all((b - a) % 7 == 1 for a, b in pairwise(ids))
        assert set(ids) == set(range(100, 107))


def test_sessions_of_a_group_begin_with_its_system_prompt() -> None:
    options = BenchOptions(turns=3, system_len=20, num_groups=2, input_len=5)
    sessions = workloads.multi_turn_sessions(options, 14, IDS)
    assert [len(session) for session in sessions] == [3, 3, 3, 3, 2]
    starts = [session[0].ids[:20] for session in sessions]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
    assert all(len(session[0].ids) == 25 and len(session[1].ids) == 5 for session in sessions)
    assert len({tuple(turn.ids[-5:]) for session in sessions for turn in session}) == 14
    assert sessions[4][1].origin == "session 4 turn 1"


def test_think_time_is_drawn_for_every_turn_but_the_first() -> None:
    options = BenchOptions(turns=5, think_time=2.0, input_len=1)
    sessions = workloads.multi_turn_sessions(options, 5000, IDS)
    assert {session[0].think_time for session in sessions} == {0.0}
    times = [turn.think_time for session in sessions for turn in session[1:]]
    assert np.mean(times) == pytest.approx(2.0, rel=0.05) and len(set(times)) == len(times)


def test_more_sessions_of_a_seed_begin_with_the_same_ones() -> None:
    few, many = (workloads.multi_turn_sessions(BenchOptions(), count, IDS) for count in (8, 16))
    assert many[:2] == few


def test_a_session_that_cannot_fit_is_refused_with_its_length() -> None:
    options = BenchOptions(workload="multi-turn", turns=2, system_len=10, input_len=20, output_len=5)
    workloads.refuse_too_long(options, 4, 60)
    with pytest.raises(Refused, match=r"60 tokens.*max_len=59;.*rebuild with --max-len 60, if the"):
        workloads.refuse_too_long(options, 4, 59)


@pytest.mark.parametrize("source", [IDS, workloads.slices(range(7))])
@pytest.mark.parametrize("workload", ["random", "multi-turn"])
def test_the_longest_session_is_known_before_there_are_ids(workload: str, source: workloads.Source) -> None:
    make = workloads.multi_turn_sessions if workload == "multi-turn" else workloads.random_sessions
    options = BenchOptions(workload=workload, turns=3, system_len=9, input_len=20, random_range_ratio=0.7)
    sessions = make(options, 20, source)
    longest = max(sum(len(turn.ids) + turn.max_tokens for turn in session) for session in sessions)
    workloads.refuse_too_long(options, 20, longest)
    with pytest.raises(Refused, match=f"the longest session is {longest} tokens"):
        workloads.refuse_too_long(options, 20, longest - 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_requests", 0), ("input_len", 0), ("output_len", -1), ("random_range_ratio", 1.0), ("turns", 0),
        ("request_rate", 0.0), ("request_rate", math.nan), ("burstiness", 0.0), ("burstiness", math.nan),
        ("concurrency", 0), ("think_time", -1.0), ("think_time", math.inf), ("seed", -1), ("num_warmups", -1),
        ("num_groups", 0), ("system_len", -1),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(name: str, value: float) -> None:
    assert code_and_field(lambda: BenchOptions(**{name: value})) == ("out_of_range", name)
