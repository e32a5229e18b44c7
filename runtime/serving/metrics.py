"""What a served engine tells Prometheus: the names, and the numbers behind them.

Latencies are counted here and told in bulk, as counters that are named like a histogram's (_bucket, _sum,
_count): an observation is a call to the server's process, and there is one per token.
"""

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from hemiola.runtime.api import Counters, Load, Metrics
from hemiola.runtime.serving.foreign import FOREIGN, Family, Series, foreign, own_labels

Outcome = Literal["success", "cancelled", "timeout", "invalid", "rejected", "error"]
OUTCOMES: tuple[Outcome, ...] = ("success", "cancelled", "timeout", "invalid", "rejected", "error")
EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

HEARTBEAT = "hemiola_heartbeat_timestamp_seconds"
RESTARTS = "hemiola_restarts_total"


FAMILIES = {
    "hemiola_requests_total": Family("counter", "requests that ended, by outcome"),
    "hemiola_requests_running": Family("gauge", "requests that have a slot"),
    "hemiola_requests_waiting": Family("gauge", "requests that wait for a slot"),
    "hemiola_prompt_tokens_total": Family("counter", "tokens of prompts that were taken"),
    "hemiola_generation_tokens_total": Family("counter", "tokens generated"),
    "hemiola_computed_tokens_total": Family("counter", "tokens computed, drafts and recomputation included"),
    "hemiola_preemptions_total": Family("counter", "requests that had to give their slot back"),
    "hemiola_prefix_query_tokens_total": Family("counter", "tokens looked up in the prefix cache"),
    "hemiola_prefix_hit_tokens_total": Family(
        "counter", "of those, tokens that had pages; and that had pages and a state, which were not computed"
    ),
    "hemiola_draft_tokens_total": Family("counter", "drafts judged, by place in the window; from 0"),
    "hemiola_accepted_tokens_total": Family("counter", "drafts that stayed, by place in the window"),
    "hemiola_pages": Family("gauge", "pages: free, cached (kept for later prompts, can be evicted), used"),
    "hemiola_slots": Family("gauge", "slots: free, running (requests), snapshots (kept states)"),
    "hemiola_snapshots_total": Family("counter", "states taken, and not taken as all others were worth more"),
    "hemiola_evictions_total": Family("counter", "pages and snapshots given up"),
    "hemiola_tier_hits_total": Family("counter", "prefixes found below the cache: in host memory, on disk"),
    "hemiola_tier_units_total": Family("counter", "units of a page's bytes loaded, saved and evicted"),
    "hemiola_tier_bytes_total": Family("counter", "of these, the bytes"),
    "hemiola_tier_declined_total": Family("counter", "loads and saves that cost more than computing again"),
    "hemiola_tier_size_bytes": Family("gauge", "bytes of a tier: free, used"),
    "hemiola_tier_on": Family("gauge", "1: the tier is in use; 0: there is none, or it failed"),
    "hemiola_steps_total": Family("counter", "steps: all rows decode, all read prompts, or mixed"),
    "hemiola_step_seconds_total": Family("counter", "time in steps"),
    "hemiola_engine_seconds_total": Family("counter", "of that, time in the engine itself"),
    HEARTBEAT: Family("gauge", "when the engine was last known to move"),
    "hemiola_healthy": Family("gauge", "1: takes requests; 0: the engine is lost"),
    RESTARTS: Family("counter", "times that `hemiola serve` has started a lost server again"),
}
HISTOGRAMS = {
    "hemiola_time_to_first_token_seconds": "from a request's arrival to its first token",
    "hemiola_inter_token_latency_seconds": "between two tokens of a request",
    "hemiola_e2e_request_latency_seconds": "from a request's arrival to its last token",
    "hemiola_request_queue_time_seconds": "from a request's arrival to its first step",
}
for _name, _help in HISTOGRAMS.items():
    FAMILIES |= {f"{_name}{part}": Family("counter", _help) for part in ("_bucket", "_sum", "_count")}
FAMILIES |= FOREIGN


class Metered(Protocol):
    """An LLM."""

    config: Any  # Resolved

    @property
    def counters(self) -> Counters: ...
    @property
    def reuse(self) -> Any: ...  # cache.statistics.Statistics
    @property
    def tiers(self) -> Mapping[str, Any]: ...  # cache.tier.TierUse
    def load(self) -> Load: ...


class Histogram:
    """Counts of values up to each edge."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.sum = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(EDGES_S, seconds)] += times
        self.sum += seconds * times

    def lines(self, name: str) -> Iterator[tuple[Series, float]]:
        total = 0
        for edge, count in zip((*map(str, EDGES_S), "+Inf"), self.counts, strict=True):
            total += count
            yield Series(f"{name}_bucket", (("le", edge),)), total
        yield Series(f"{name}_sum"), self.sum
        yield Series(f"{name}_count"), total


class Meter:
    """Counts what requests do; other threads may call it, none waits for long."""

    def __init__(self, num_positions: int, num_restarts: int = 0) -> None:
        self._num_restarts = num_restarts
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._drafted = [0] * num_positions
        self._accepted = [0] * num_positions
        self._histograms = {name: Histogram() for name in HISTOGRAMS}
        self._ttft, self._itl, self._e2e, self._queue = self._histograms.values()

    def taken(self, num_prompt_tokens: int) -> None:
        with self._lock:
            self._num_prompt_tokens += num_prompt_tokens

    def first(self, seconds: float) -> None:
        with self._lock:
            self._ttft.add(seconds)

    def later(self, seconds: float, num_tokens: int) -> None:
        """So many tokens that came together, so long after the last ones."""
        with self._lock:
            self._itl.add(seconds / num_tokens, num_tokens)

    def ended(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[outcome] += 1

    def measured(self, metrics: Metrics, whole: bool) -> None:
        """One of a request's answers; whole: it ended by itself."""
        with self._lock:
            if metrics.first_scheduled:
                self._queue.add(metrics.first_scheduled - metrics.arrival)
            if metrics.last_token and whole:
                self._e2e.add(metrics.last_token - metrics.arrival)
            for place, (drafted, accepted) in enumerate(zip(metrics.drafted, metrics.accepted, strict=True)):
                self._drafted[place] += drafted
                self._accepted[place] += accepted

    def read(self, engine: Metered) -> dict[Series, float]:
        """Every line of the page but the model's name."""
        with self._lock:
            counts = dict(self._own())
        load = engine.load()
        levels = dict(_levels(load)) | dict(_tiers(engine.tiers))
        return counts | dict(_sums(engine)) | levels | dict(foreign(load, engine.reuse, engine.config))

    def _own(self) -> Iterator[tuple[Series, float]]:
        for outcome in OUTCOMES:
            yield Series("hemiola_requests_total", (("outcome", outcome),)), self._outcomes[outcome]
        yield Series("hemiola_prompt_tokens_total"), self._num_prompt_tokens
        yield Series(RESTARTS), self._num_restarts
        for name, counts in (("draft", self._drafted), ("accepted", self._accepted)):
            for place, count in enumerate(counts):
                yield Series(f"hemiola_{name}_tokens_total", (("position", str(place)),)), count
        for name, histogram in self._histograms.items():
            yield from histogram.lines(name)


def _sums(engine: Metered) -> Iterator[tuple[Series, float]]:
    counters, reuse = engine.counters, engine.reuse
    yield Series("hemiola_generation_tokens_total"), counters.num_output_tokens
    yield Series("hemiola_computed_tokens_total"), counters.num_computed_tokens
    yield Series("hemiola_preemptions_total"), counters.num_preemptions
    yield Series("hemiola_step_seconds_total"), counters.step_seconds
    yield Series("hemiola_engine_seconds_total"), counters.engine_seconds
    yield Series("hemiola_prefix_query_tokens_total"), reuse.query_tokens
    for name, label, counts in (
        ("steps", "kind", {
            "prompt": counters.num_prompt_steps, "mixed": counters.num_mixed_steps,
            "decode": counters.num_steps - counters.num_prompt_steps - counters.num_mixed_steps,
        }),
        ("prefix_hit_tokens", "kind", {"pages": reuse.page_hit_tokens, "states": reuse.hit_tokens}),
        ("snapshots", "outcome", {"taken": reuse.num_snapshots, "refused": reuse.refused_snapshots}),
        ("evictions", "kind", {
            "page": reuse.evicted_pages, "snapshot": reuse.evicted_snapshots + reuse.stranded_snapshots,
        }),
    ):  # fmt: skip
        for value, count in counts.items():
            yield Series(f"hemiola_{name}_total", ((label, value),)), count


def _levels(load: Load) -> Iterator[tuple[Series, float]]:
    yield Series("hemiola_requests_running"), load.num_running
    yield Series("hemiola_requests_waiting"), load.num_waiting
    yield Series("hemiola_healthy"), not load.failure
    yield Series(HEARTBEAT), time.time() - load.stalled_s
    used = load.num_pages - load.num_free_pages - load.num_idle_pages
    snapshots = load.num_slots - load.num_free_slots - load.num_running
    for name, counts in (
        ("pages", {"free": load.num_free_pages, "cached": load.num_idle_pages, "used": used}),
        ("slots", {"free": load.num_free_slots, "running": load.num_running, "snapshots": snapshots}),
    ):
        for state, count in counts.items():
            yield Series(f"hemiola_{name}", (("state", state),)), max(0, count)


def _tiers(tiers: Mapping[str, Any]) -> Iterator[tuple[Series, float]]:
    for name, use in tiers.items():
        tier, counts = ("tier", name), use.statistics
        yield Series("hemiola_tier_hits_total", (tier,)), counts.num_hits
        yield Series("hemiola_tier_declined_total", (tier,)), counts.num_declined
        for kind in ("loaded", "saved", "evicted"):
            num_units = getattr(counts, f"{kind}_units")
            yield Series("hemiola_tier_units_total", (tier, ("kind", kind))), num_units
            yield Series("hemiola_tier_bytes_total", (tier, ("kind", kind))), num_units * use.unit_bytes
        for state, num_units in (("free", use.num_free), ("used", use.num_units - use.num_free)):
            yield Series("hemiola_tier_size_bytes", (tier, ("state", state))), num_units * use.unit_bytes
        yield Series("hemiola_tier_on", (tier,)), use.is_on


class Board:
    """The model's metrics in tritonserver's page. A line that has not changed costs nothing."""

    def __init__(self, family: Any, labels: dict[str, str]) -> None:
        self._family = family  # pb_utils.MetricFamily
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._metrics: dict[Series, Any] = {}
        self._posted: dict[Series, float] = {}

    def post(self, values: dict[Series, float]) -> None:
        for series, value in values.items():
            if series not in self._metrics:
                self._metrics[series] = self._make(series)
                if series.name == RESTARTS:  # tritonserver's, not the engine's: one before has counted them
                    self._posted[series] = self._metrics[series].value()
            posted = self._posted.get(series)
            if value == posted:
                continue
            self._posted[series] = value
            if FAMILIES[series.name].kind == "gauge":
                self._metrics[series].set(float(value))  # also 0: an engine before this one has left its own
            elif value:
                self._metrics[series].increment(float(value - (posted or 0)))

    def close(self) -> None:
        """The engine is unloaded, of which tritonserver would keep the last levels."""
        for series, metric in self._metrics.items():
            if FAMILIES[series.name].kind == "gauge" and series.name != HEARTBEAT:
                metric.set(0.0)

    def _make(self, series: Series) -> Any:
        kind, text = FAMILIES[series.name]
        if series.name not in self._families:
            value = getattr(self._family, kind.upper())
            self._families[series.name] = self._family(name=series.name, description=text, kind=value)
        return self._families[series.name].Metric(labels=own_labels(series, self._labels))
