"""A picture of a benchmark: distributions of latencies, and throughput over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hemiola.runtime.bench.measure import Measured
from hemiola.runtime.bench.statistics import LATENCIES, MS, latencies, token_counts

TITLES = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2el": "End-to-end latency"}
MAX_BINS, LEAST_BINS = 60, 5
STEPS_PER_BIN = 10  # with few, the curve would show the steps and not the rate


class Curve(NamedTuple):
    name: str
    measured: Measured


def plot(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Cumulative shares of requests (or gaps) by latency; output tokens per second from start to end."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, name in zip(axes, (name for name in LATENCIES if name in TITLES), strict=False):
        for curve in curves:
            values = np.sort(latencies([r for r in curve.measured.results if r.completed])[name]) * MS
            axis.step(
                values,
                np.arange(1, len(values) + 1) / max(len(values), 1),
                where="post",
                label=_plain(curve.name),
            )
        axis.set(title=TITLES[name], xlabel="ms", ylabel="share at most", ylim=(0, 1.02))
    last = list(figure.axes)[-1]
    for curve in curves:
        seconds, rates = throughput(curve.measured)
        last.step(seconds, rates, where="post", label=_plain(curve.name))
    last.set(title="Output throughput", xlabel="s", ylabel="tokens/s")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    if len(curves) > 1:
        figure.axes[0].legend()
    figure.suptitle(_plain(title))
    figure.savefig(path)


def _plain(name: str) -> str:
    """matplotlib takes what stands between dollars for a formula."""
    return name.replace("$", r"\$")


def throughput(measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Starts of equal spans of the run, and output tokens per second in each."""
    done = [result for result in measured.results if result.completed]
    duration = max(measured.end - measured.start, 1e-9)
    step = np.median(latencies(done)["itl"] or [duration])
    num_bins = int(np.clip(duration / (STEPS_PER_BIN * step), LEAST_BINS, MAX_BINS))
    counts = token_counts(done, measured.start, duration / num_bins, num_bins)
    return np.arange(num_bins) * duration / num_bins, counts * num_bins / duration
