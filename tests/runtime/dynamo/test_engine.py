"""The engine that Dynamo's worker drives, without Dynamo: calls and chunks in Dynamo's order and form."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from kit.router_index import RouterIndex

from hemiola.runtime import manifest
from hemiola.runtime.api import Load, SamplingParams
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.cache.tree import Entry
from hemiola.runtime.dynamo import engine, events, handover
from hemiola.runtime.dynamo.binding import Errors
from hemiola.runtime.dynamo.card import make_card
from hemiola.runtime.dynamo.engine import DynamoEngine, WorkerBounds
from hemiola.runtime.dynamo.handover import Handover
from hemiola.runtime.dynamo.load import Snapshot
from hemiola.runtime.dynamo.options import WorkerOptions
from hemiola.runtime.dynamo.reply import last_chunk
from hemiola.runtime.errors import Failed, Lost, Refused
from hemiola.runtime.llm import LLM

PROMPT = [5, 6, 7, 5, 6, 7, 8] * 3


class Invalid(Exception):
    pass


class Gone(Exception):
    pass


class Broken(Exception):
    pass


class Full(Exception):
    pass


@dataclass
class Call:
    """Dynamo's context."""

    name: str = "a"

    def id(self) -> str:
        return self.name


@dataclass
class Heard:
    """Dynamo's publishers."""

    events: list[dict[str, Any]] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        self.events += events

    def publish(self, rank: int, load: object) -> None:
        assert rank == 0
        self.loads.append(load)


class Worker:
    """What Dynamo's worker does with an engine, in its order."""

    def __init__(
        self,
        engine_dir: Path,
        hang_timeout_s: float = 60,
        mode: str = "agg",
        max_queue: int = 256,
        store: Path | None = None,
        **options: object,
    ) -> None:
        self.heard = Heard()
        self.llm: LLM | None = None

        def open_llm() -> LLM:
            self.llm = LLM(engine_dir, **options)
            return self.llm

        errors, lost = Errors(Invalid, Gone, Broken, Full), self.heard.lost.append
        own = WorkerOptions(disaggregation_mode=mode)
        hand_over = partial(Handover, own=own) if mode != "agg" else None
        self.engine = DynamoEngine(
            open_llm, id, errors, WorkerBounds(0, hang_timeout_s, max_queue), lost, hand_over, store
        )

    async def __aenter__(self) -> "Worker":
        assert await self.engine.start(7) == id(self.llm)
        self.engine.attach_snapshot_publisher(self.heard)
        for source in await self.engine.kv_event_sources():
            source.on_ready(self.heard)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.cleanup()
        await self.engine.cleanup()

    def ask(self, call: Call | None = None, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        stopping = {"max_tokens": fields.pop("max_tokens", 12), "ignore_eos": True}
        sampling = {"temperature": fields.pop("temperature", 0.0), "seed": fields.pop("seed", None)}
        sampling |= fields.pop("sampling", {})
        request = {"token_ids": PROMPT, "stop_conditions": stopping, "sampling_options": sampling, **fields}
        return self.engine.generate(request, call or Call())


def joined(chunks: list[dict[str, Any]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk["token_ids"]]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test with an event loop of its own."""

    def run(engine_dir: Path) -> None:
        asyncio.run(test(engine_dir))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@running
async def test_chunks_have_the_tokens_of_the_plain_run(engine_dir: Path) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    with LLM(engine_dir, drafts="none") as plain:
        (whole,) = plain.generate(PROMPT, params)
    async with Worker(engine_dir, drafts="mtp") as worker:
        outputs = {"logprobs": 2, "prompt_logprobs": 1}
        chunks = [c async for c in worker.ask(temperature=0.7, seed=3, output_options=outputs)]
    assert joined(chunks) == whole.token_ids and all(chunk["index"] == 0 for chunk in chunks)
    scores = whole.logprobs
    assert scores is not None and whole.prompt_logprobs is not None
    assert [s for chunk in chunks for s in chunk["log_probs"]] == [score.logprob for score in scores]
    tops = [top for chunk in chunks for top in chunk["top_logprobs"]]
    assert [[(t["token_id"], t["logprob"]) for t in top] for top in tops] == [list(s.top) for s in scores]
    assert [t["rank"] for t in tops[0]] == [1, 2]
    *most, last = chunks
    assert all("finish_reason" not in chunk for chunk in most) and last["finish_reason"] == "length"
    usage = {"prompt_tokens": 21, "completion_tokens": 12, "total_tokens": 33}
    assert last["completion_usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    of_prompt = last["engine_data"]["prompt_logprobs"]
    assert of_prompt[0] is None and len(of_prompt) == len(PROMPT)
    assert of_prompt[3][str(PROMPT[3])]["logprob"] == whole.prompt_logprobs[3].logprob
    json.dumps(chunks)


def test_a_prompts_log_probabilities_hold_up_all_streams(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 100,000 tokens with their 20 best are two million objects, which the event loop made."""
    within_loop = []

    def make(*given: Any) -> dict[str, Any]:
        within_loop.append(threading.current_thread() is threading.main_thread())
        return last_chunk(*given)

    async def ask() -> None:
        async with Worker(engine_dir) as worker:
            for outputs in ({}, {"prompt_logprobs": 1}):
                (chunk,) = [c async for c in worker.ask(max_tokens=1, output_options=outputs)]
                assert ("engine_data" in chunk) == bool(outputs)

    monkeypatch.setattr(engine, "last_chunk", make)
    asyncio.run(ask())
    assert within_loop == [True, False]


@running
async def test_a_stream_that_was_cut_goes_on_elsewhere_to_the_same_end(engine_dir: Path) -> None:
    """At every chunk; the second worker gets what Dynamo's frontend would send."""
    rules = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    async with Worker(engine_dir) as first, Worker(engine_dir) as second:
        chunks = [c async for c in first.ask(temperature=1.0, seed=4, sampling=rules)]
        whole = joined(chunks)
        assert len(chunks) > 3
        for cut in range(1, len(chunks)):
            said = joined(chunks[:cut])
            rest = second.ask(
                token_ids=[*PROMPT, *said],
                migration_link=chunks[cut - 1]["worker_trace_link"],
                max_tokens=12 - len(said),
                temperature=1.0,
                seed=4,
                sampling=rules,
            )
            more = [chunk async for chunk in rest]
            assert said + joined(more) == whole, f"cut at chunk {cut}"
            assert more[-1]["completion_usage"]["prompt_tokens"] == len(PROMPT)


@running
async def test_a_stream_that_was_cut_behind_its_last_token_ran_on_to_max_len(engine_dir: Path) -> None:
    """The frontend had all tokens, and not the word that these were all: it asks for 0 more. Of one chunk,
    of several; at an end token, at a stop string, at max_len."""
    async with Worker(engine_dir, max_len=64) as worker:
        llm = worker.llm
        assert llm is not None
        said = joined([chunk async for chunk in worker.ask(max_tokens=9)])
        stop = next(text for text in map(llm._text.decode, ([token_id] for token_id in said)) if text)
        own_end = {"stop_token_ids": [said[4]]}
        for stops in (
            {"max_tokens": 1, "ignore_eos": True},
            {"max_tokens": 9, "ignore_eos": True},
            {"max_tokens": 30, **own_end},
            {"max_tokens": None, **own_end},
            {"max_tokens": None, "ignore_eos": True},
            {"max_tokens": 30, "ignore_eos": True, "stop": [stop]},
        ):
            chunks = [chunk async for chunk in worker.ask(stop_conditions=stops)]
            ids = joined(chunks)
            left = {"max_tokens": stops["max_tokens"] and stops["max_tokens"] - len(ids)}
            link = {"migration_link": chunks[-1]["worker_trace_link"], "token_ids": [*PROMPT, *ids]}
            rest = [chunk async for chunk in worker.ask(stop_conditions=stops | left, **link)]
            assert joined(rest) == [], stops
            assert rest[-1]["finish_reason"] == chunks[-1]["finish_reason"], stops
            assert rest[-1]["completion_usage"]["completion_tokens"] == len(ids), stops


@running
async def test_an_abort_and_a_reader_who_leaves_end_the_request(engine_dir: Path) -> None:
    async with Worker(engine_dir) as worker:
        stream = worker.ask(max_tokens=200)
        assert (await anext(stream))["token_ids"]
        await worker.engine.abort(Call("another"))
        await worker.engine.abort(Call("a"))
        assert [c async for c in stream][-1]["finish_reason"] == "cancelled"
        llm, aborted = worker.llm, []
        assert llm is not None
        llm.abort = lambda request_id, abort=llm.abort: (aborted.append(request_id), abort(request_id))
        stream = worker.ask(Call("b"), max_tokens=200)
        await anext(stream)
        await stream.aclose()
        assert len(aborted) == 1
        await until(lambda: llm.load().num_running == 0)
        assert await worker.engine.is_quiescent()


@running
async def test_a_request_whose_caller_leaves_while_its_grammar_is_compiled_runs_on(engine_dir: Path) -> None:
    async with Worker(engine_dir) as worker:
        llm, begun, go_on = worker.llm, threading.Event(), threading.Event()
        assert llm is not None and llm._grammars is not None
        make, aborted = llm._grammars.compile, []
        llm.abort = lambda request_id, abort=llm.abort: (aborted.append(request_id), abort(request_id))

        def compile_slowly(params: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return make(params)

        llm._grammars.compile = compile_slowly
        for leave in ("abort", "cancel"):
            begun.clear(), go_on.clear()
            guided = {"guided_decoding": {"regex": "[a-z ]{150,}"}}
            stops = {"max_tokens": 200}  # and the end token
            call = worker.ask(Call(leave), sampling=guided, stop_conditions=stops)
            first = asyncio.ensure_future(anext(call))
            await until(begun.is_set)
            if leave == "abort":
                await worker.engine.abort(Call(leave))
            else:
                first.cancel()
            go_on.set()
            if leave == "abort":
                assert (await first)["finish_reason"] == "cancelled"
            await asyncio.wait([first])
            await call.aclose()
            await until(lambda: aborted)
            await until(lambda: llm.load().num_running + llm.load().num_waiting == 0)
            assert llm.counters.num_output_tokens < 150
            assert await worker.engine.is_quiescent()
            aborted.clear()


@running
async def test_refusals_are_the_callers_fault_and_a_lost_engine_is_not(engine_dir: Path) -> None:
    async with Worker(engine_dir) as worker:
        with pytest.raises(Invalid, match="n is 2, which is not served"):
            await anext(worker.ask(sampling={"n": 2}))
        with pytest.raises(Invalid, match="token id 99999 at position 0"):
            await anext(worker.ask(token_ids=[99999]))
        stream, llm = worker.ask(max_tokens=200), worker.llm
        await anext(stream)
        assert llm is not None
        llm._loop.lose(Failed("a rank has ended"))
        with pytest.raises(Gone, match="a rank has ended"):
            [chunk async for chunk in stream]
        with pytest.raises(Gone, match="takes no more requests"):
            await anext(worker.ask())
        await until(lambda: worker.heard.lost)
        assert "a rank has ended" in worker.heard.lost[0]


@running
async def test_a_probe_of_a_busy_engine_waits_behind_its_requests(engine_dir: Path) -> None:
    """Dynamo's patience with it ends after 3 s. It is answered when the engine moves, and not before."""
    async with Worker(engine_dir) as worker:
        engine, llm = worker.engine, worker.llm
        assert llm is not None
        payload, submit, found = await engine.health_check_payload(), Mock(wraps=llm.submit), llm.load()
        llm.submit = submit
        assert [chunk async for chunk in engine.generate(payload, Call())][-1]["finish_reason"] == "length"
        assert submit.call_count == 1, "the engine was idle, and said a token"
        llm.load = Mock(return_value=found._replace(num_running=1, stalled_s=5.0))
        probe = asyncio.ensure_future(anext(engine.generate(payload, Call())))
        await until(lambda: llm.load.call_count > 4)
        assert not probe.done()
        llm.load.return_value = found._replace(num_running=1, stalled_s=0.0)
        assert (await probe)["finish_reason"] == "stop" and submit.call_count == 1


@running
async def test_requests_of_one_id_are_one_to_the_queue_a_drain_and_an_abort(engine_dir: Path) -> None:
    """Dynamo takes the id that its caller sends (`x-dynamo-request-id`)."""
    async with Worker(engine_dir, max_queue=1, max_rows=1) as worker:
        llm, aborted = worker.llm, []
        assert llm is not None
        llm.abort = lambda request_id, abort=llm.abort: (aborted.append(request_id), abort(request_id))
        streams = [worker.ask(Call("same"), max_tokens=100) for _ in range(2)]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: len(worker.engine._running) == 2)
        with pytest.raises(Full, match="2 requests are under way in 1 row, and no more than max_queue=1"):
            await anext(worker.ask(Call("more")))
        assert [(await one)["token_ids"] for one in first]
        await streams[1].aclose()
        assert not await worker.engine.is_quiescent()
        await worker.engine.abort(Call("same"))
        assert len(set(aborted)) == 2
        await streams[0].aclose()
        assert await worker.engine.is_quiescent()
        assert [chunk async for chunk in worker.ask(Call("later"))]


def test_events_that_nobody_takes_have_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 3)
    begun, go_on, taken = threading.Event(), threading.Event(), []

    class Slow:
        def publish_batch(self, batch: list[dict[str, Any]]) -> None:
            begun.set()
            assert go_on.wait(60)
            taken.extend(batch)

    made = events.CacheEvents(Slow(), 4)
    page = Entry(b"k" * 16, Entry(b"", None, b"", 0, 0, 0), bytes(16), 1, 4, 0)
    made.removed([page])
    assert begun.wait(60)
    for _ in range(9):
        made.removed([page])
    go_on.set()
    made.close()
    assert len(taken) == 4 and len(caplog.records) == 1
    assert "Dynamo takes events of the cache too slowly" in caplog.text


@running
async def test_an_engine_that_stands_still_keeps_its_streams_and_its_worker_waiting(engine_dir: Path) -> None:
    """The worker was ended by Dynamo, half a minute later, without a word."""
    begun, go_on = threading.Event(), threading.Event()

    def stand_still(piece: object) -> None:
        begun.set()
        go_on.wait(60)

    async with Worker(engine_dir, hang_timeout_s=1.0) as worker:
        still = Load(1, 0, 8, 0, 0, 8, 0, stalled_s=100.0, failure="")
        assert not worker.engine._why_lost(still, 0.1), "it was stopped itself, as a paused container is"
        llm = worker.llm
        assert llm is not None
        llm.submit(PROMPT, SamplingParams(max_tokens=5), stand_still)
        await until(begun.is_set)
        waiting = asyncio.ensure_future(anext(worker.ask()))
        await until(lambda: worker.heard.lost)
        assert "the engine has not moved for" in worker.heard.lost[0]
        for one in (waiting, anext(worker.ask())):
            with pytest.raises(Gone, match="the engine has not moved for"):
                await asyncio.wait_for(one, 60)
        await asyncio.wait_for(worker.engine.cleanup(), 60)
        go_on.set()
        llm.close()


@running
async def test_a_load_that_cannot_be_published_ended_the_watch_over_the_engine(engine_dir: Path) -> None:
    """Pages that were freed and cached between two looks were counted twice, and Dynamo takes no number below
    0: nobody looked any more whether the engine moves."""
    load = Load(1, 0, 8, 7, 2, 8, 0, stalled_s=0.0, failure="")
    assert Snapshot.of(load, Statistics()).kv_used_blocks == 0
    async with Worker(engine_dir) as worker:
        worker.engine.attach_snapshot_publisher(refuses := Mock(publish=Mock(side_effect=OverflowError)))
        await until(lambda: refuses.publish.call_count > 1)
        assert worker.llm is not None and not worker.heard.lost
        worker.llm._loop.lose(Failed("a rank has ended"))
        await until(lambda: worker.heard.lost)


def test_a_worker_that_nobody_can_find_any_more_is_lost(engine_dir: Path, tmp_path: Path) -> None:
    """Files of Dynamo's discovery were removed: frontends answer 404, and the worker said that it is well."""
    store = tmp_path / "store"

    async def run() -> None:
        async with Worker(engine_dir, store=store) as worker:
            assert [chunk async for chunk in worker.ask()], "before Dynamo has made it"
            store.mkdir()
            await until(lambda: worker.engine._has_store)
            store.rmdir()
            await until(lambda: worker.heard.lost)
            assert worker.heard.lost == [f"{store}, in which frontends find this worker, was removed"]

    asyncio.run(run())


@running
async def test_a_drain_finishes_what_runs_and_takes_no_more(engine_dir: Path) -> None:
    worker = Worker(engine_dir)
    await worker.__aenter__()
    stream = worker.ask(max_tokens=60)
    first = await anext(stream)
    ended = asyncio.create_task(worker.engine.cleanup())
    rest = [chunk async for chunk in stream]
    await ended
    assert len(joined([first, *rest])) == 60 and rest[-1]["finish_reason"] == "length"
    with pytest.raises(Gone, match="closed"):
        await anext(worker.ask())


@running
async def test_events_and_loads_follow_the_cache(engine_dir: Path) -> None:
    salted = {"routing": {"cache_salt": "tenant"}}
    async with Worker(engine_dir) as worker:
        heard, llm = worker.heard, worker.llm
        assert llm is not None
        index = RouterIndex(llm.config.page_len)
        ids = PROMPT + joined([c async for c in worker.ask(max_tokens=40)])
        [c async for c in worker.ask(max_tokens=40, **salted)]
        await until(lambda: len(heard.events) > 1 and heard.loads)
        for event in heard.events:
            index.hear(event)
        depth = index.depth(ids, "")
        assert depth > 0 and index.depth(ids, "tenant") == depth and index.depth(ids, "other") == 0
        llm.reset_prefix_cache()
        await until(lambda: heard.events[-1]["type"] == "removed")
        await until(lambda: heard.loads[-1].kv_used_blocks == 0)
        assert heard.loads[0].kv_total_blocks == llm.load().num_pages


@running
async def test_the_engines_metrics_stand_in_dynamos_page(engine_dir: Path) -> None:
    """By outcome: two whole, one refused, one whose reader left, one for which there was no room."""
    pages: list[Callable[[], str]] = []
    metrics = SimpleNamespace(
        auto_labels={"model": "/folder", "model_name": 'a "b"', "worker_id": "7f"},
        register_prometheus_expfmt_callback=pages.append,
    )
    async with Worker(engine_dir, max_queue=0, max_rows=1) as worker:
        await worker.engine.register_prometheus(metrics)
        whole = [chunk async for chunk in worker.ask()]
        rest = worker.ask(
            token_ids=[*PROMPT, *joined(whole[:2])],
            migration_link=whole[1]["worker_trace_link"],
            max_tokens=12 - len(joined(whole[:2])),
        )
        assert [chunk async for chunk in rest]
        with pytest.raises(Invalid):
            await anext(worker.ask(token_ids=[99999]))
        stream = worker.ask(max_tokens=200)
        await anext(stream)
        with pytest.raises(Full):
            await anext(worker.ask(Call("b")))
        await stream.aclose()
        (page,) = pages
        lines = dict(line.rsplit(" ", 1) for line in page().splitlines() if line[0] != "#")
    own = r'model="/folder",model_name="a \"b\"",worker_id="7f"'
    counts = {"success": 2, "cancelled": 1, "invalid": 1, "rejected": 1, "error": 0, "timeout": 0}
    found = {name: float(lines[f'hemiola_requests_total{{{own},outcome="{name}"}}']) for name in counts}
    assert found == counts
    assert float(lines[f"hemiola_prompt_tokens_total{{{own}}}"]) == 3 * len(PROMPT)
    assert float(lines[f"hemiola_time_to_first_token_seconds_count{{{own}}}"]) == 2
    later = 11 + 12 - len(joined(whole[:2])) - 1
    assert float(lines[f"hemiola_inter_token_latency_seconds_count{{{own}}}"]) == later
    (vllm,) = (name for name in lines if name.startswith("vllm:num_requests_running{"))
    assert r'model_name="a \"b\""' in vllm and 'engine="0"' in vllm
    assert "# TYPE hemiola_time_to_first_token_seconds histogram" in page()


@running
async def test_a_worker_that_does_not_open_says_why_and_cleans_up(engine_dir: Path) -> None:
    worker = Worker(engine_dir, num_pages=1)
    with pytest.raises(Refused):
        await worker.engine.start(1)
    await worker.engine.cleanup()
    assert isinstance(worker.engine.error, Refused)


def test_an_engine_of_two_ranks_is_a_worker_like_others(tiny_engine: Callable[..., Path]) -> None:
    """Its chunks, its events, and a stream that goes on at another one."""
    pair = tiny_engine("qwen3_5_moe_divisible", tp=2)
    rules = {"temperature": 0.8, "seed": 3, "sampling": {"frequency_penalty": 0.5}}

    async def run() -> None:
        with LLM(pair, drafts="none", prefix_cache=False) as plain:
            params = SamplingParams(
                max_tokens=40, temperature=0.8, seed=3, frequency_penalty=0.5, ignore_eos=True
            )
            (whole,) = plain.generate(PROMPT, params)
        async with Worker(pair) as first, Worker(pair) as second:
            chunks = [chunk async for chunk in first.ask(max_tokens=40, **rules)]
            assert joined(chunks) == whole.token_ids
            cut = len(chunks) // 2
            said = joined(chunks[:cut])
            link = {"token_ids": [*PROMPT, *said], "migration_link": chunks[cut - 1]["worker_trace_link"]}
            more = [c async for c in second.ask(max_tokens=40 - len(said), **link, **rules)]
            assert said + joined(more) == whole.token_ids
            heard, llm = first.heard, first.llm
            assert llm is not None
            await until(lambda: heard.events and heard.loads)
            index = RouterIndex(llm.config.page_len)
            for event in heard.events:
                index.hear(event)
            assert index.depth(PROMPT + whole.token_ids, "") > 0

    asyncio.run(run())


class FakePeer:
    """Bytes of this process, without NIXL."""

    exports: ClassVar[dict[str, Any]] = {}
    fetched: ClassVar[list[str]] = []

    def __init__(self, export: Any, host: str, port: int) -> None:
        self.address = f"{host}:{len(self.exports) + 1}" if export else ""
        if export:
            self.exports[self.address] = export

    def fetch(self, address: str, ids: list[int], salt: str) -> bytes:
        if address not in self.exports:
            raise Lost(f"the peer {address} is gone")
        self.fetched.append(address)
        return bytes(self.exports[address](ids, cache_salt=salt))

    def close(self) -> None: ...


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> type[FakePeer]:
    monkeypatch.setattr(handover, "Peer", FakePeer)
    FakePeer.exports, FakePeer.fetched = {}, []
    return FakePeer


def out_of_memory(prompt: list[int], *, cache_salt: str) -> bytes:
    raise MemoryError


HOST = {"host_cache_bytes": 2**24}
LONG = PROMPT * 5


def test_a_prompt_is_computed_by_one_worker_and_answered_by_another(
    engine_dir: Path, peers: type[FakePeer]
) -> None:
    """With a salt, penalties and a seed: the answer is that of one worker alone."""
    rules = {"temperature": 0.9, "seed": 5, "sampling": {"presence_penalty": 1.0}}
    rules |= {"token_ids": LONG, "routing": {"cache_salt": "tenant"}}

    async def run() -> None:
        async with Worker(engine_dir, **HOST) as alone:
            wanted = joined([chunk async for chunk in alone.ask(**rules)])
        async with (
            Worker(engine_dir, mode="prefill", **HOST) as first,
            Worker(engine_dir, mode="decode", **HOST) as second,
        ):
            *_, last = [chunk async for chunk in first.ask(**rules)]
            assert last["completion_usage"]["completion_tokens"] == 1, "a prefill worker has answered"
            result = {"disaggregated_params": last["disaggregated_params"]}
            chunks = [chunk async for chunk in second.ask(prefill_result=result, **rules)]
            assert joined(chunks) == wanted and len(peers.fetched) == 1
            details = chunks[-1]["completion_usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] >= 64, "what was computed elsewhere was computed again"
            assert "disaggregated_params" not in chunks[-1]

    asyncio.run(run())


def test_clocks_that_differ_by_minutes_change_nothing(
    engine_dir: Path, peers: type[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that one worker says to another has a time of day."""
    jumps, now = itertools.cycle([0, -600, 900]), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))

    async def run() -> None:
        async with (
            Worker(engine_dir, mode="prefill", **HOST) as first,
            Worker(engine_dir, mode="decode", **HOST) as second,
            Worker(engine_dir, mode="decode", **HOST) as third,
        ):
            *_, last = [chunk async for chunk in first.ask(token_ids=LONG)]
            result = {"disaggregated_params": last["disaggregated_params"]}
            chunks = [chunk async for chunk in second.ask(token_ids=LONG, prefill_result=result)]
            whole, said = joined(chunks), joined(chunks[:3])
            rest = {"token_ids": [*LONG, *said], "migration_link": chunks[2]["worker_trace_link"]}
            more = third.ask(max_tokens=12 - len(said), prefill_result=result, **rest)
            assert said + joined([chunk async for chunk in more]) == whole and len(peers.fetched) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"disaggregated_params": {"hemiola_peer": "127.0.0.1:9"}}, "the peer 127.0.0.1:9 is gone"),
        ({"disaggregated_params": None}, ""),
        ({"disaggregated_params": {"hemiola_peer": "another"}}, "packed has engine "),
        ({"disaggregated_params": {"hemiola_peer": "broken"}}, "computed here"),
        (None, ""),
    ],
)
def test_a_prompt_whose_prefix_cannot_be_had_is_computed_by_who_answers(
    engine_dir: Path,
    tiny_engine: Callable[..., Path],
    peers: type[FakePeer],
    caplog: pytest.LogCaptureFixture,
    result: Any,
    said: str,
) -> None:
    async def run() -> None:
        with LLM(tiny_engine("nemotron_h_moe"), **HOST) as another, LLM(engine_dir) as plain:
            another.generate([LONG], SamplingParams(max_tokens=1))
            peers.exports["another"], peers.exports["broken"] = another.export_prefix, out_of_memory
            (wanted,) = plain.generate([LONG], SamplingParams(max_tokens=12, ignore_eos=True))
            async with Worker(engine_dir, mode="decode", **HOST) as worker:
                found = [c async for c in worker.ask(token_ids=LONG, prefill_result=result)]
            assert joined(found) == wanted.token_ids

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if "computed here" in record.getMessage()]
    assert len(lines) == bool(said) and said in "".join(lines)


def test_prefill_workers_that_say_nothing_hold_up_no_other_request(
    engine_dir: Path, peers: type[FakePeer], caplog: pytest.LogCaptureFixture
) -> None:
    """Fetches had asyncio's own threads, in which grammars are compiled, too."""
    go_on = threading.Event()

    def silent(prompt: list[int], *, cache_salt: str) -> bytes:
        assert go_on.wait(60)
        raise Lost("the peer silent does not answer")

    async def run() -> None:
        async with Worker(engine_dir, mode="decode", **HOST) as worker:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            peers.exports["silent"] = silent
            hung = {"token_ids": LONG, "prefill_result": {"disaggregated_params": {"hemiola_peer": "silent"}}}
            calls = [worker.ask(Call(f"hung {n}"), **hung) for n in range(handover.MOST_FETCHES)]
            waiting = [asyncio.ensure_future(anext(call)) for call in calls]
            await until(lambda: len(peers.fetched) == handover.MOST_FETCHES)
            guided = {"guided_decoding": {"regex": "[a-z]{3}"}}
            own = {"sampling": guided, "stop_conditions": {"max_tokens": 9}}
            assert [chunk async for chunk in worker.ask(Call("guided"), **own)]
            assert not caplog.records
            assert [chunk async for chunk in worker.ask(Call("one more"), **hung)]
            assert "16 others wait for their workers" in caplog.text
            assert not any(one.done() for one in waiting)
            go_on.set()
            assert all([(await one)["token_ids"] for one in waiting])
            for call in calls:
                await call.aclose()

    try:
        asyncio.run(run())
    finally:
        go_on.set()


def test_a_worker_that_does_all_refuses_what_a_prefill_worker_has_said(engine_dir: Path) -> None:
    async def run() -> None:
        async with Worker(engine_dir) as worker:
            with pytest.raises(Invalid, match="prefill_result"):
                await anext(worker.ask(prefill_result={"disaggregated_params": None}))

    asyncio.run(run())


def test_a_card_is_made_once_and_names_the_engine(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = manifest.load(engine_dir)
    card = make_card(engine_dir, found)
    config = json.loads((card / "config.json").read_text())
    assert config["hemiola_identity"] == found.identity and config["eos_token_id"] == list(found.eos_ids)
    tokenizer = card / "tokenizer.json"
    assert tokenizer.read_bytes() == (engine_dir / "tokenizer/tokenizer.json").read_bytes()
    before = tokenizer.stat().st_mtime_ns
    assert make_card(engine_dir, found) == card and tokenizer.stat().st_mtime_ns == before
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:100])
    assert make_card(engine_dir, found) == card and tokenizer.read_bytes() == whole, "a torn card was used"
    other = make_card(engine_dir, found.model_copy(update={"identity": "another"}))
    assert other != card, "engines of two identities had one card"
    assert len(list(card.parent.iterdir())) == 2, "something was left behind"


def test_a_card_is_where_only_its_worker_finds_it(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    card = make_card(engine_dir, manifest.load(engine_dir))
    assert card.is_relative_to(tmp_path / "home" / ".cache") and not (tmp_path / "cache").exists()
