"""The page that Prometheus reads, of a real tritonserver."""

import bisect
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from kit.served import until
from kit.triton_calls import events, post, scrape

from hemiola.runtime.api import Metrics, Piece, SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.metrics import EDGES_S, FAMILIES

pytestmark = pytest.mark.server

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/deploy/grafana.json"
MODEL = {"model": "hemiola", "version": "1"}
SECOND = MODEL | {"model": "second"}
RARE = {"hemiola_evictions_total", "hemiola_preemptions_total", "hemiola_restarts_total"} | {
    "hemiola_tier_bytes_total"  # this server has no tiers
}
SELECTOR = re.compile(r"(hemiola_\w+)\{([^}]*)\}(\[)?")


def settled(server: Server, name: str, value: float, **labels: str) -> dict:
    """The page once a line of it says so; posts come every second."""
    end = time.monotonic() + 60
    key = (name, frozenset((MODEL | labels).items()))
    while (page := scrape(server)).get(key) != value:
        assert time.monotonic() < end, (key, page.get(key))
        time.sleep(0.1)
    return page


def posted(server: Server, model: str = "hemiola") -> dict:
    """The page with all that was done before this call; its lines come one by one, the heartbeat late.

    The first heartbeat from now on may be that of a post which was under way.
    """
    key = "hemiola_heartbeat_timestamp_seconds", frozenset((MODEL | {"model": model}).items())
    beats, page = {scrape(server).get(key)}, {}
    until(lambda: page.update(scrape(server)) or beats.add(page.get(key)) or len(beats) == 3)
    return page


def test_the_page_counts_what_was_done(server: Server) -> None:
    before, began = posted(server), time.time()
    prompt = list(range(3, 131))
    body = {"input_ids": prompt, "max_tokens": 20, "ignore_eos": True}
    post(server, body)
    list(events(post(server, {**body, "stream": True}, endpoint="generate_stream")))
    post(server, {"text_input": "a", "max_tokens": 900, "ignore_eos": True, "num_drafts": 0, "timeout": 1})
    post(server, {"text_input": "a", "max_tokens": 0})

    def rise(name: str, **labels: str) -> float:
        key = (name, frozenset((MODEL | labels).items()))
        return page[key] - before[key]

    page = posted(server)
    assert rise("hemiola_requests_total", outcome="success") == 2
    assert rise("hemiola_requests_total", outcome="timeout") == 1
    assert rise("hemiola_requests_total", outcome="invalid") == 1
    assert rise("hemiola_prompt_tokens_total") >= 2 * len(prompt)
    assert rise("hemiola_prefix_hit_tokens_total", kind="states") >= 96, "the second prompt was the first"
    assert rise("hemiola_steps_total", kind="prompt") >= 2 and rise("hemiola_steps_total", kind="decode") > 0
    drafted, accepted = (rise(f"hemiola_{name}_tokens_total", position="0") for name in ("draft", "accepted"))
    assert drafted > 0 and accepted >= 0
    assert page["hemiola_healthy", frozenset(MODEL.items())] == 1
    heartbeat = page["hemiola_heartbeat_timestamp_seconds", frozenset(MODEL.items())]
    assert began <= heartbeat <= time.time()
    for name in ("running", "waiting"):
        settled(server, f"hemiola_requests_{name}", 0)
    page = settled(server, "hemiola_pages", 0, state="used")
    for name in ("pages", "slots"):
        parts = [value for (found, _), value in page.items() if found == f"hemiola_{name}"]
        assert len(parts) == 6 and all(part >= 0 for part in parts), "three states of each model"


def test_every_name_is_on_the_page_from_the_start(server: Server) -> None:
    own = {("model", "second"), ("model_name", "second")}  # vLLM's lines have the second
    names = {name for name, labels in scrape(server) if own & labels}
    assert names >= set(FAMILIES), set(FAMILIES) - names


@dataclass(frozen=True)
class Seen:
    """A request, as its client saw it; seconds from when it was sent."""

    num_tokens: int
    first: float
    last: float
    metrics: Metrics  # what the engine says of it


@dataclass(frozen=True)
class Traffic:
    before: dict
    after: dict
    seen: list[Seen]

    def rise(self, name: str, **labels: str) -> float:
        key = (f"hemiola_{name}", frozenset((SECOND | labels).items()))
        return self.after[key] - self.before.get(key, 0)


@pytest.fixture(scope="module")
def traffic(server: Server) -> Traffic:
    """Free and guided requests with drafts, four at a time, some that share a prefix, and refused ones."""
    before = posted(server, "second")
    free = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={7: 90})  # again and again: drafts stay
    guided = SamplingParams(max_tokens=12, structured_outputs={"regex": "[a-z]{40,50}"})
    asked = [(list(range(3, 60 + i % 3)), (free, guided)[i % 2]) for i in range(12)]
    with Client(server.grpc_url, "second") as client, ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda each: see(client, *each), asked))
        for bad in (
            SamplingParams(stop_token_ids=[10**6]),
            SamplingParams(structured_outputs={"json": False}),
        ):
            with pytest.raises(Refused):
                client.generate([[5]], bad)
    traffic = Traffic(before, posted(server, "second"), seen)
    assert traffic.rise("requests_total", outcome="success") == len(asked)
    return traffic


def see(client: Client, prompt: list[int], params: SamplingParams) -> Seen:
    start = time.perf_counter()
    found: list[tuple[float, Piece]] = []
    for piece in client.stream(prompt, params):
        found.append((time.perf_counter() - start, piece))
    times = [at for at, piece in found if piece.token_ids]
    metrics = found[-1][1].metrics
    assert metrics is not None
    return Seen(sum(len(piece.token_ids) for _, piece in found), times[0], times[-1], metrics)


def test_the_page_counts_what_clients_count(traffic: Traffic) -> None:
    seen = traffic.seen
    tokens = sum(each.num_tokens for each in seen)
    assert traffic.rise("generation_tokens_total") == tokens == 6 * 24 + 6 * 12
    assert traffic.rise("inter_token_latency_seconds_count") == tokens - len(seen)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert traffic.rise(f"{name}_seconds_count") == len(seen)
    assert traffic.rise("requests_total", outcome="invalid") == 2
    for name in ("drafted", "accepted"):
        lists = [getattr(each.metrics, name) for each in seen]
        for place in range(max(map(len, lists))):
            own = sum(counts[place] for counts in lists if place < len(counts))
            word = {"drafted": "draft", "accepted": "accepted"}[name]
            assert traffic.rise(f"{word}_tokens_total", position=str(place)) == own
    assert sum(sum(each.metrics.accepted) for each in seen) > 0


def test_the_page_measures_what_clients_measure(traffic: Traffic) -> None:
    """A client's time holds the server's, and that holds the engine's; no clock is compared with another."""
    seen = traffic.seen

    def total(seconds: Callable[[Seen], float]) -> float:
        return sum(map(seconds, seen))

    def up_to(edge: float, seconds: Callable[[Seen], float]) -> int:
        return bisect.bisect_right(sorted(map(seconds, seen)), edge)

    def queued(each: Seen) -> float:
        return each.metrics.first_scheduled - each.metrics.arrival

    def whole(each: Seen) -> float:
        return each.metrics.last_token - each.metrics.arrival

    first, between = (
        traffic.rise(f"{name}_seconds_sum") for name in ("time_to_first_token", "inter_token_latency")
    )
    assert total(lambda each: each.metrics.time_to_first_token) <= first <= total(lambda each: each.first)
    assert total(whole) <= first + between <= total(lambda each: each.last)
    assert traffic.rise("request_queue_time_seconds_sum") == pytest.approx(total(queued), abs=1e-6)
    assert traffic.rise("e2e_request_latency_seconds_sum") == pytest.approx(total(whole), abs=1e-6)
    for edge in EDGES_S:
        le = str(edge)
        assert traffic.rise("request_queue_time_seconds_bucket", le=le) == up_to(edge, queued)
        assert traffic.rise("e2e_request_latency_seconds_bucket", le=le) == up_to(edge, whole)
        soonest = up_to(edge, lambda each: each.metrics.time_to_first_token)
        counted = traffic.rise("time_to_first_token_seconds_bucket", le=le)
        assert up_to(edge, lambda each: each.first) <= counted <= soonest


def test_every_query_of_the_dashboard_finds_data(traffic: Traffic) -> None:
    """Lines of its names and labels; where it asks for a rate, some that rose, but for what is rare."""
    page = traffic.after
    names = {name for name, _ in page}
    labels = {label for _, pairs in page for label, _ in pairs}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) >= 15
    for query in queries:
        asked = set(re.findall(r"\b(?:hemiola|nv)_\w+", query))
        assert asked and asked <= names, (query, asked - names)
        used = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query) + re.findall(r"by \(([^)]*)\)", query)
        assert {word.strip() for text in used for word in text.split(",")} <= labels | {"instance"}, query
        for name, matchers, is_rate in SELECTOR.findall(query):
            equal = set(re.findall(r'(\w+)="([^"]*)"', matchers)) | {("model", "second")}
            lines = [key for key in page if key[0] == name and equal <= key[1]]
            assert lines, query
            if is_rate and name not in RARE:
                assert any(page[key] > traffic.before.get(key, 0) for key in lines), (query, name)


EPP = {  # by type of server, llm-d's router: waiting, running, share of the pages, tokens of a page, pages
    "vllm": (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info block_size",
        "vllm:cache_config_info num_gpu_blocks",
    ),
    "triton-tensorrt-llm": (
        "nv_trt_llm_request_metrics{request_type=waiting}",
        "nv_trt_llm_request_metrics{request_type=scheduled}",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
        "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
    ),
}


@pytest.mark.parametrize("kind", EPP)
def test_the_endpoint_picker_reads_the_load_under_names_that_it_knows(traffic: Traffic, kind: str) -> None:
    """By its rules: of a name the line with the labels that it wants, or that line's label."""
    own = {("model", "second"), ("model_name", "second")}
    page = {key: value for key, value in traffic.after.items() if key[1] & own}
    found = []
    for asked in EPP[kind]:
        name, labels, from_label = re.fullmatch(r"([\w:]+)(?:{(.*)})?(?: (\w+))?", asked).groups()
        wanted = {tuple(labels.split("="))} if labels else set()
        ((chosen, value),) = [
            (line, value) for line, value in page.items() if line[0] == name and wanted <= line[1]
        ]
        found.append(float(dict(chosen[1])[from_label]) if from_label else value)
    states = ("free", "cached", "used")
    pages = [page["hemiola_pages", frozenset({*SECOND.items(), ("state", state)})] for state in states]
    assert found == [0, 0, 0, 32, sum(pages)], "all is done; the engine was built with pages of 32 tokens"


def test_vllms_counters_of_the_prefix_cache_are_ours(traffic: Traffic) -> None:
    def rise(name: str) -> float:
        key = f"vllm:prefix_cache_{name}_total", frozenset({("model_name", "second"), ("engine", "0")})
        return traffic.after[key] - traffic.before[key]

    assert rise("queries") == traffic.rise("prefix_query_tokens_total")
    assert rise("hits") == traffic.rise("prefix_hit_tokens_total", kind="states") > 0


def test_scrapes_do_not_wait_for_a_busy_engine(server: Server) -> None:
    body = {"text_input": "a", "max_tokens": 450, "ignore_eos": True, "stream": True}
    answers = [
        requests.post(
            f"{server.http_url}/v2/models/hemiola/generate_stream", json=body, stream=True, timeout=60
        )
        for _ in range(4)
    ]
    for _ in range(5):
        scrape(server, timeout=30)
    assert all(list(events(answer))[-1]["finish_reason"] == "length" for answer in answers)
