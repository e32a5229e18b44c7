"""The page that Prometheus reads, of a real tritonserver."""

import json
import re
import time
from pathlib import Path

import pytest
import requests
from kit.triton_calls import events, post, scrape

from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.metrics import FAMILIES

pytestmark = pytest.mark.server

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/deploy/grafana.json"
MODEL = {"model": "hemiola", "version": "1"}


def settled(server: Server, name: str, value: float, **labels: str) -> dict:
    """The page once a line of it says so; posts come every second."""
    end = time.monotonic() + 60
    key = (name, frozenset((MODEL | labels).items()))
    while (page := scrape(server)).get(key) != value:
        assert time.monotonic() < end, (key, page.get(key))
        time.sleep(0.1)
    return page


def test_the_page_counts_what_was_done(server: Server) -> None:
    time.sleep(1.5)  # what other tests did
    before = scrape(server)
    prompt = list(range(3, 131))
    body = {"input_ids": prompt, "max_tokens": 20, "ignore_eos": True}
    post(server, body)
    list(events(post(server, {**body, "stream": True}, endpoint="generate_stream")))
    post(server, {"text_input": "a", "max_tokens": 400, "ignore_eos": True, "timeout": 1})
    post(server, {"text_input": "a", "max_tokens": 0})

    def rise(name: str, **labels: str) -> float:
        key = (name, frozenset((MODEL | labels).items()))
        return page[key] - before[key]

    done = (f"hemiola_{name}" for name in ("requests_total",))
    key = (next(done), frozenset((MODEL | {"outcome": "success"}).items()))
    page = settled(server, key[0], before[key] + 2, outcome="success")
    assert rise("hemiola_requests_total", outcome="timeout") == 1
    assert rise("hemiola_requests_total", outcome="invalid") == 1
    assert rise("hemiola_prompt_tokens_total") >= 2 * len(prompt)
    assert rise("hemiola_generation_tokens_total") >= 40
    assert rise("hemiola_time_to_first_token_seconds_count") >= 2
    assert rise("hemiola_e2e_request_latency_seconds_count") == 2
    assert rise("hemiola_request_queue_time_seconds_bucket", le="+Inf") >= 2
    assert (
        30 <= rise("hemiola_inter_token_latency_seconds_count") <= rise("hemiola_generation_tokens_total") - 2
    )
    assert rise("hemiola_prefix_hit_tokens_total", kind="states") >= 96, "the second prompt was the first"
    assert rise("hemiola_steps_total", kind="prompt") >= 2 and rise("hemiola_steps_total", kind="decode") > 0
    drafted, accepted = (rise(f"hemiola_{name}_tokens_total", position="0") for name in ("draft", "accepted"))
    assert drafted > 0 and accepted >= 0
    assert page["hemiola_healthy", frozenset(MODEL.items())] == 1
    heartbeat = page["hemiola_heartbeat_timestamp_seconds", frozenset(MODEL.items())]
    assert abs(time.time() - heartbeat) < 10
    for name in ("running", "waiting"):
        settled(server, f"hemiola_requests_{name}", 0)
    page = settled(server, "hemiola_pages", 0, state="used")
    for name in ("pages", "slots"):
        parts = [value for (found, _), value in page.items() if found == f"hemiola_{name}"]
        assert len(parts) == 6 and all(part >= 0 for part in parts), "three states of each model"


def test_every_name_is_on_the_page_from_the_start(server: Server) -> None:
    names = {name for name, labels in scrape(server) if ("model", "second") in labels}
    assert names >= set(FAMILIES), set(FAMILIES) - names


def test_every_query_of_the_dashboard_names_lines_that_are_there(server: Server) -> None:
    page = scrape(server)
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
