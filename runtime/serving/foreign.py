"""Metrics under the names of other servers, which routers and autoscalers read.

The endpoint picker of the Gateway API (llm-d's router) knows two of the servers that we can stand for: Triton
with TensorRT-LLM's backend (type `triton-tensorrt-llm`) and vLLM (type `vllm`, its default).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from hemiola.runtime.api import Load

REQUESTS = "nv_trt_llm_request_metrics"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
VLLM = "vllm:"


class Family(NamedTuple):
    kind: Literal["counter", "gauge"]
    help: str


class Series(NamedTuple):
    """A line of the page: a family's name and its labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


FOREIGN = {
    REQUESTS: Family("gauge", "requests: waiting, scheduled (have a slot), max (can have one)"),
    BLOCKS: Family(
        "gauge", "pages: max, used by requests, free (kept ones too); used / max; tokens of a page"
    ),
    "vllm:num_requests_running": Family("gauge", "as hemiola_requests_running"),
    "vllm:num_requests_waiting": Family("gauge", "as hemiola_requests_waiting"),
    "vllm:kv_cache_usage_perc": Family("gauge", "share of the pages that requests use; 1 is all"),
    "vllm:prefix_cache_queries_total": Family("counter", "as hemiola_prefix_query_tokens_total"),
    "vllm:prefix_cache_hits_total": Family("counter", "as hemiola_prefix_hit_tokens_total of kind states"),
    "vllm:cache_config_info": Family("gauge", "tokens of a page, and pages"),
}


def own_labels(series: Series, labels: Mapping[str, str]) -> dict[str, str]:
    """All labels of a line; labels: those of its model. vLLM's lines have the labels that vLLM gives them."""
    if series.name.startswith(VLLM):
        labels = {"model_name": labels["model"], "engine": "0"}
    return {**labels, **dict(series.labels)}


def foreign(load: Load, reuse: Any, config: Any) -> Iterator[tuple[Series, float]]:
    """reuse: cache.statistics.Statistics; config: Resolved."""
    num_used = max(0, load.num_pages - load.num_free_pages - load.num_idle_pages)
    share = num_used / load.num_pages
    for kind, count in (
        ("waiting", load.num_waiting),
        ("scheduled", load.num_running),
        ("max", config.max_rows),
    ):
        yield Series(REQUESTS, (("request_type", kind),)), count
    for kind, value in (
        ("max", load.num_pages),
        ("used", num_used),
        ("free", load.num_pages - num_used),
        ("fraction", share),
        ("tokens_per", config.page_len),
    ):
        yield Series(BLOCKS, (("kv_cache_block_type", kind),)), value
    yield Series("vllm:num_requests_running"), load.num_running
    yield Series("vllm:num_requests_waiting"), load.num_waiting
    yield Series("vllm:kv_cache_usage_perc"), share
    yield Series("vllm:prefix_cache_queries_total"), reuse.query_tokens
    yield Series("vllm:prefix_cache_hits_total"), reuse.hit_tokens
    sizes = ("block_size", str(config.page_len)), ("num_gpu_blocks", str(load.num_pages))
    yield Series("vllm:cache_config_info", sizes), 1
