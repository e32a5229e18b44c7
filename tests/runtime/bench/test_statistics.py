"""Numbers that were worked out by hand."""

import pytest

from hemiola.runtime.api import Metrics, SamplingParams
from hemiola.runtime.bench import statistics
from hemiola.runtime.bench.measure import BenchResult, Measured


def result(
    due: float,
    pieces: dict[float, int],
    prompt_len: int = 4,
    finish_reason: str | None = "length",
    **counts: object,
) -> BenchResult:
    """pieces: time -> number of tokens."""
    metrics = Metrics(num_prompt_tokens=prompt_len, arrival=due, **counts)
    made = BenchResult(0, 0, "request 0", [1] * prompt_len, SamplingParams(), due, sent=due + 0.25)
    made.piece_times, made.piece_lens = list(pieces), list(pieces.values())
    made.token_ids, made.metrics = [5] * sum(pieces.values()), metrics
    made.done, made.finish_reason = max(pieces, default=due), finish_reason
    return made


def measured(*results: BenchResult, end: float = 20.0, num_planned: int | None = None) -> Measured:
    return Measured(list(results), len(results) if num_planned is None else num_planned, 10.0, end, False)


def test_a_request_whose_tokens_come_one_by_one() -> None:
    one = result(10.0, {10.5: 1, 10.6: 1, 10.8: 1, 11.1: 1})
    assert statistics.ttft(one) == pytest.approx(0.5)
    assert statistics.tpot(one) == pytest.approx(0.6 / 3)
    assert statistics.itls(one) == pytest.approx([0.1, 0.2, 0.3])
    assert statistics.e2el(one) == pytest.approx(1.1)


def test_tokens_that_come_together_share_one_gap() -> None:
    """7 tokens in pieces of 1, 4, 2: three arrivals, two gaps; six tokens after the first in 0.9 s."""
    one = result(10.0, {10.5: 1, 10.8: 4, 11.4: 2})
    assert statistics.itls(one) == pytest.approx([0.3, 0.6])
    assert statistics.tpot(one) == pytest.approx(0.15)


def test_one_token_has_no_time_per_output_token() -> None:
    one = result(10.0, {10.5: 1})
    assert (
        statistics.tpot(one) is None
        and statistics.itls(one) == []
        and statistics.ttft(one) == pytest.approx(0.5)
    )
    summary = statistics.summarize(measured(one))
    assert summary["mean_tpot_ms"] is None and summary["p99_itl_ms"] is None
    assert summary["mean_ttft_ms"] == pytest.approx(500)


def test_percentiles_are_interpolated() -> None:
    found = statistics.spread("x", [0.004, 0.001, 0.002, 0.003])  # sorted: 1 2 3 4 ms
    assert found == pytest.approx(
        {
            "mean_x_ms": 2.5,
            "median_x_ms": 2.5,
            "std_x_ms": 1.25**0.5,
            "p99_x_ms": 3.97,
        }  # rank 0.99 * 3 = 2.97
    )
    assert statistics.spread("x", [i / 1000 for i in range(101)])["p99_x_ms"] == pytest.approx(99)


def test_a_summary_by_hand() -> None:
    first = result(10.0, {11.0: 1, 12.0: 3}, prompt_len=6)  # ttft 1, tpot 1/3, itl 1, e2el 2
    second = result(11.5, {14.5: 1, 15.0: 1, 16.5: 1}, prompt_len=2)  # ttft 3, tpot 1, itl 0.5 1.5, e2el 5
    found = statistics.summarize(measured(first, second))
    expected = {
        "duration": 10.0, "completed": 2, "failed": 0, "unfinished": 0,
        "total_input_tokens": 8, "total_output_tokens": 7,
        "request_throughput": 0.2, "output_throughput": 0.7, "total_token_throughput": 1.5,
        "max_output_tokens_per_s": 3.0, "max_concurrent_requests": 2,
        "mean_ttft_ms": 2000, "median_ttft_ms": 2000, "p99_ttft_ms": 2980, "std_ttft_ms": 1000,
        "mean_tpot_ms": 2000 / 3, "median_tpot_ms": 2000 / 3, "std_tpot_ms": 1000 / 3,
        "p99_tpot_ms": 1000 / 3 + 0.99 * 2000 / 3,
        "mean_itl_ms": 1000, "median_itl_ms": 1000, "p99_itl_ms": 1490,
        "mean_e2el_ms": 3500, "median_e2el_ms": 3500, "p99_e2el_ms": 4970,
        "prefix_cache_prompt_tokens": 8, "prefix_cache_hit_tokens": 0, "prefix_cache_hit_rate": 0.0,
        "num_preemptions": 0,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert not any(key.startswith("spec_decode") for key in found)
    assert found["ttfts"] == pytest.approx([1.0, 3.0]) and found["start_times"] == pytest.approx([0.0, 1.5])
    assert found["itls"] == [pytest.approx([1.0]), pytest.approx([0.5, 1.5])] and found["errors"] == ["", ""]
    assert found["input_lens"] == [6, 2] and found["output_lens"] == [4, 3]


def test_failed_and_unfinished_requests_are_counted_and_in_nothing_else() -> None:
    good = result(10.0, {11.0: 1, 12.0: 1})
    bad = result(10.0, {19.0: 5}, finish_reason="error", cached_tokens=3, drafted=[1], accepted=[1])
    bad.error = "it broke"
    gone = result(10.0, {19.0: 5}, finish_reason="cancelled")
    found = statistics.summarize(measured(good, bad, gone, num_planned=5))
    assert (found["completed"], found["failed"], found["unfinished"]) == (1, 2, 2)
    assert found["total_output_tokens"] == 2 and found["mean_e2el_ms"] == pytest.approx(2000)
    assert found["prefix_cache_hit_tokens"] == 0 and "spec_decode_num_drafts" not in found
    assert found["errors"] == ["", "request 0: it broke", "request 0: cancelled"]


def test_nothing_completed() -> None:
    found = statistics.summarize(measured(result(10.0, {}, finish_reason="error"), end=10.0))
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["max_concurrent_requests"] == 0
    assert found["request_throughput"] == 0 and found["prefix_cache_hit_rate"] is None


def test_speculation_by_hand() -> None:
    """Two requests: 4 windows of up to 3 drafts, and 2 windows of 1."""
    first = result(10.0, {11.0: 1}, drafted=[4, 4, 3], accepted=[3, 2, 1])
    second = result(10.0, {11.0: 1}, drafted=[2], accepted=[1])
    none = result(10.0, {11.0: 1})
    found = statistics.summarize(measured(first, second, none))
    expected = {
        "spec_decode_num_drafts": 6,
        "spec_decode_draft_tokens": 13,
        "spec_decode_accepted_tokens": 7,
        "spec_decode_acceptance_rate": 100 * 7 / 13,
        "spec_decode_acceptance_length": 1 + 7 / 6,
        "spec_decode_per_position_acceptance_rates": [4 / 6, 2 / 6, 1 / 6],
    }
    assert {key: value for key, value in found.items() if key.startswith("spec_decode")} == {
        key: pytest.approx(value) for key, value in expected.items()
    }


def test_nothing_accepted_is_a_length_of_1() -> None:
    found = statistics.summarize(measured(result(10.0, {11.0: 1}, drafted=[2, 2], accepted=[])))
    assert found["spec_decode_acceptance_length"] == 1.0 and found["spec_decode_acceptance_rate"] == 0.0
    assert found["spec_decode_per_position_acceptance_rates"] == [0.0, 0.0]


def test_hit_rate() -> None:
    first = result(10.0, {11.0: 1}, prompt_len=30, cached_tokens=16)
    second = result(10.0, {11.0: 1}, prompt_len=10, num_preemptions=2)
    found = statistics.summarize(measured(first, second))
    assert (found["prefix_cache_prompt_tokens"], found["prefix_cache_hit_tokens"]) == (40, 16)
    assert found["prefix_cache_hit_rate"] == pytest.approx(40.0) and found["num_preemptions"] == 2


def test_a_request_that_waits_for_a_place_is_not_concurrent() -> None:
    first, second = result(10.0, {12.0: 1}), result(10.0, {14.0: 1})
    assert statistics.summarize(measured(first, second))["max_concurrent_requests"] == 2
    second.sent = 12.0
    assert statistics.summarize(measured(first, second))["max_concurrent_requests"] == 1


def test_peak_counts_a_span_up_to_its_end() -> None:
    assert statistics.peak([(0, 2), (1, 3), (2, 4)]) == 2  # one ends as another begins
    assert statistics.peak([(0, 2), (1, 3), (1.9, 4)]) == 3
    assert statistics.peak([]) == 0


def test_tokens_are_counted_in_the_second_that_they_came_in() -> None:
    results = [result(10.0, {10.2: 1, 10.9: 4, 12.0: 2}), result(10.0, {10.95: 1, 13.5: 1})]
    assert statistics.token_counts(results, 10.0, 1.0, 4).tolist() == [6, 0, 2, 1]
    assert statistics.summarize(measured(*results))["max_output_tokens_per_s"] == 6
