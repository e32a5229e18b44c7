"""The load of an engine under other servers' names, and what its tiers have done."""

from types import SimpleNamespace

import pytest

from hemiola.runtime.api import Counters, Load
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.cache.tier import NO_TIER, TierStatistics, TierUse
from hemiola.runtime.serving.metrics import FAMILIES, Meter, Series

NO_DISK = {"disk loaded": 0, "disk saved": 0, "disk evicted": 0}


def engine(**load: int) -> SimpleNamespace:
    """Busy; with a host tier of 10 units of 100 bytes, 2 of them free, and no disk."""
    held = dict(num_running=3, num_waiting=5, num_pages=40, num_free_pages=6, num_idle_pages=4)
    held |= {"num_slots": 8, "num_free_slots": 1, "stalled_s": 0.0, "failure": ""} | load
    return SimpleNamespace(
        counters=Counters(),
        reuse=Statistics(query_tokens=90, hit_tokens=60),
        tiers={"host": TierUse(TierStatistics(3, 4, 5, 6, 7), 10, 2, 100, True), "disk": NO_TIER},
        config=SimpleNamespace(max_rows=7, page_len=16),
        load=lambda: Load(**held),
    )


def lines(name: str, **load: int) -> dict[str, float]:
    """Of a family, by its labels' values."""
    page = Meter(2).read(engine(**load))
    return {
        " ".join(label for _, label in series.labels): value
        for series, value in page.items()
        if series.name == name
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nv_trt_llm_request_metrics", {"waiting": 5, "scheduled": 3, "max": 7}),
        (
            "nv_trt_llm_kv_cache_block_metrics",
            {"max": 40, "used": 30, "free": 10, "fraction": 0.75, "tokens_per": 16},
        ),
        ("vllm:num_requests_waiting", {"": 5}),
        ("vllm:num_requests_running", {"": 3}),
        ("vllm:kv_cache_usage_perc", {"": 0.75}),
        ("vllm:cache_config_info", {"16 40": 1}),
        ("vllm:prefix_cache_queries_total", {"": 90}),
        ("vllm:prefix_cache_hits_total", {"": 60}),
        ("hemiola_tier_hits_total", {"host": 3, "disk": 0}),
        (
            "hemiola_tier_units_total",
            {"host loaded": 4, "host saved": 5, "host evicted": 6, **NO_DISK},
        ),
        (
            "hemiola_tier_bytes_total",
            {"host loaded": 400, "host saved": 500, "host evicted": 600, **NO_DISK},
        ),
        ("hemiola_tier_size_bytes", {"host free": 200, "host used": 800, "disk free": 0, "disk used": 0}),
        ("hemiola_tier_on", {"host": 1, "disk": 0}),
        ("hemiola_tier_declined_total", {"host": 7, "disk": 0}),
    ],
)  # fmt: skip
def test_a_line_says_what_the_engine_holds(name: str, expected: dict[str, float]) -> None:
    assert lines(name) == expected


def test_pages_that_are_kept_for_later_prompts_are_not_in_use() -> None:
    """A router would send no requests to a replica whose cache is full of what can be evicted."""
    assert lines("vllm:kv_cache_usage_perc", num_free_pages=0, num_idle_pages=40) == {"": 0.0}


def test_every_family_has_lines() -> None:
    assert {series.name for series in Meter(2).read(engine())} == FAMILIES.keys()
    assert all(type(series) is Series for series in Meter(2).read(engine()))
