"""From the times of a run to its numbers, under the names that `vllm bench serve` gives them in JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hemiola.runtime.bench.measure import BenchResult, Measured

Summary = dict[str, Any]  # JSON: numbers, lists, None where there is nothing to say
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MS = 1000.0


def ttft(result: BenchResult) -> float | None:
    """From when the request was due to its first tokens."""
    return result.piece_times[0] - result.due if result.piece_times else None


def e2el(result: BenchResult) -> float:
    return result.done - result.due


def tpot(result: BenchResult) -> float | None:
    """Mean time per token after the first, over the whole request."""
    later = len(result.token_ids) - 1
    return (result.piece_times[-1] - result.piece_times[0]) / later if later > 0 else None


def itls(result: BenchResult) -> list[float]:
    """Between pieces, as a reader sees them: tokens that came together have no gap between them."""
    return np.diff(result.piece_times).tolist()


def summarize(measured: Measured) -> Summary:
    """The numbers of the requests that completed; the others are only counted."""
    done = [result for result in measured.results if result.completed]
    failed = [result for result in measured.results if not result.completed]
    duration = max(measured.end - measured.start, 1e-9)  # nothing could be sent: 0
    total_input = sum(len(result.prompt_ids) for result in done)
    total_output = sum(len(result.token_ids) for result in done)
    summary: Summary = {
        "duration": duration,
        "completed": len(done),
        "failed": len(failed),
        "unfinished": measured.num_planned - len(measured.results),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _max_tokens_in_a_second(done, measured.start),
        "max_concurrent_requests": peak([(result.sent, result.done) for result in done]),
    }
    values = latencies(done)
    for name in LATENCIES:
        summary |= spread(name, values[name])
    return summary | _speculation(done) | _prefix_cache(done) | _details(measured)


def latencies(results: Sequence[BenchResult]) -> dict[str, list[float]]:
    """Seconds, of all requests together."""
    return {
        "ttft": [value for result in results if (value := ttft(result)) is not None],
        "tpot": [value for result in results if (value := tpot(result)) is not None],
        "itl": [value for result in results for value in itls(result)],
        "e2el": [e2el(result) for result in results],
    }


def spread(name: str, seconds: Sequence[float]) -> Summary:
    """Percentiles are interpolated linearly between the two nearest values."""
    if not seconds:
        return {f"{what}_{name}_ms": None for what in ("mean", "median", "std", "p99")}
    values = np.asarray(seconds) * MS
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def peak(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans [start, end) that overlap."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


def token_counts(results: Sequence[BenchResult], start: float, width: float, num_bins: int) -> np.ndarray:
    """Output tokens in each `width` seconds after the start."""
    times = np.array([time - start for result in results for time in result.piece_times])
    lens = np.array([length for result in results for length in result.piece_lens])
    bins = np.minimum((times / width).astype(int), num_bins - 1)
    return np.bincount(bins, lens, minlength=num_bins)


def _max_tokens_in_a_second(done: Sequence[BenchResult], start: float) -> float:
    if not done:
        return 0.0
    seconds = int(max(result.done for result in done) - start) + 1
    return float(token_counts(done, start, 1.0, seconds).max())


def _speculation(done: Sequence[BenchResult]) -> Summary:
    """Nothing without drafts. Rates by position are per window: they add up to the mean accepted."""
    drafted = _sum_by_position([result.metrics.drafted for result in done if result.metrics])
    accepted = _sum_by_position([result.metrics.accepted for result in done if result.metrics])
    if not sum(drafted):
        return {}
    num_drafts = drafted[0]
    accepted += [0] * (len(drafted) - len(accepted))
    return {
        "spec_decode_acceptance_rate": 100 * sum(accepted) / sum(drafted),
        "spec_decode_acceptance_length": 1 + sum(accepted) / num_drafts,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": sum(drafted),
        "spec_decode_accepted_tokens": sum(accepted),
        "spec_decode_per_position_acceptance_rates": [count / num_drafts for count in accepted],
    }


def _sum_by_position(lists: Sequence[Sequence[int]]) -> list[int]:
    sums = [0] * max(map(len, lists), default=0)
    for counts in lists:
        for position, count in enumerate(counts):
            sums[position] += count
    return sums


def _prefix_cache(done: Sequence[BenchResult]) -> Summary:
    prompt = sum(result.metrics.num_prompt_tokens for result in done if result.metrics)
    hit = sum(result.metrics.cached_tokens for result in done if result.metrics)
    return {
        "prefix_cache_prompt_tokens": prompt,
        "prefix_cache_hit_tokens": hit,
        "prefix_cache_hit_rate": 100 * hit / prompt if prompt else None,
        "num_preemptions": sum(result.metrics.num_preemptions for result in done if result.metrics),
    }


def _details(measured: Measured) -> Summary:
    """Request by request, the failed ones included; times in seconds."""
    results = measured.results
    return {
        "input_lens": [len(result.prompt_ids) for result in results],
        "output_lens": [len(result.token_ids) for result in results],
        "ttfts": [ttft(result) for result in results],
        "itls": [itls(result) for result in results],
        "latencies": [e2el(result) for result in results],
        "start_times": [result.due - measured.start for result in results],
        "queue_times": [result.sent - result.due for result in results],
        "errors": [f"{result.origin}: {result.error or result.finish_reason}" if not result.completed else ""
                   for result in results],
    }  # fmt: skip
