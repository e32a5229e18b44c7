"""Decode steps as CUDA graphs: every bucket, and the reports against vLLM that began with graphs.

    GPU_STORMS=1000 SEED=0 pytest tests/gpu/test_graphs.py -k storm

test_engine.py runs its cases with graphs and without; here is what only graphs can break.
"""

import importlib
import itertools
import os
import random
from collections.abc import Callable, Iterable

import pytest
from kit.engine_hand import EngineHand, windows
from kit.gpu_engines import (
    DEMO,
    FAMILIES,
    MARKS,
    NO_REHEARSAL,
    NUM_DRAFTS,
    PAGE,
    SAMPLED,
    SIZES,
    START,
    Engines,
)
from kit.proposers import Scripted

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.schedule.request import Request
from hemiola.runtime.step import bucket
from hemiola.runtime.step.bucket import Bucket
from hemiola.runtime.step.captured import Captured
from hemiola.runtime.step.eager import EagerSteps

pytestmark = MARKS
FAMILY = pytest.mark.parametrize("family", FAMILIES)
STORMS = int(os.environ.get("GPU_STORMS", "12"))
SEED = int(os.environ.get("SEED", "0"))
EDITED = {"repetition_penalty": 1.1, "logit_bias": {9: 1.0}, "min_tokens": 3, "logprobs": 2}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "adaptive"])
@FAMILY
def test_every_bucket_gives_the_plain_runs_bits(
    make_hand: Callable[..., EngineHand],
    story: Callable,
    family: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any number of rows, so padding, too; greedy, sampled and edited ones beside each other."""
    is_adaptive, text = kind == "adaptive", story(family)
    drafts = "mtp" if is_adaptive else kind
    monkeypatch.setattr(bucket, "FEW_PAIRS", 1)  # as if there were many rows
    hand = make_hand(family, drafts, cuda_graphs=True, pipeline_depth=1, adaptive_drafts=is_adaptive)
    decoder, used = hand.loop.steps.whole, set()
    run = decoder.run
    decoder.run = lambda size: used.add(size) or run(size)
    idle = random.Random(3)  # stretches without drafts, whose pairs the head reads later
    windows, longest = [0, 0, 1, NUM_DRAFTS] if is_adaptive else [0, NUM_DRAFTS], [0]

    def choose(requests: list[Request], most: list[int]) -> list[int]:
        if idle.random() < 0.4:
            longest[0] = idle.choice(windows)
        return [min(num, longest[0]) for num in most]

    hand.loop.scheduler.pace.choose = choose
    mixes = ([{}], [SAMPLED, {}], [SAMPLED | {"top_k": 0}, {}], [EDITED, SAMPLED, {}])
    for num, kinds in itertools.product((1, 2, 3, 5, 8), mixes):
        for at in range(num):
            hand.submit(text[: 17 + 9 * at], max_tokens=24, seed=at, **kinds[at % len(kinds)])
        hand.run()
    hand.end()
    assert {b[:2] for b in used} == {b[:2] for b in decoder.buckets}
    assert kinds_of(used) == kinds_of(decoder.buckets)


def kinds_of(buckets: Iterable[Bucket]) -> set[tuple[int, int, int]]:
    """Tokens of a row, passes, and pairs of a row."""
    return {(b.tokens // b.rows, b.passes, b.pairs // b.rows) for b in buckets}


@pytest.mark.parametrize("kv_dtype", ["fp8", "turboquant_4bit_nc", "turboquant_3bit_nc"])
@FAMILY
def test_narrow_pages_keep_the_plain_runs_bits(
    make_hand: Callable[..., EngineHand], story: Callable, family: str, kv_dtype: str
) -> None:
    """Over drafts, hits, chunks and preemption; the texts are those of another engine."""
    hand = make_hand(family, "mtp", {"kv_dtype": kv_dtype}, cuda_graphs=True, pipeline_depth=1)
    for again in range(2):
        for at in range(8):
            hand.submit(story(family)[: 17 + 23 * at + again], max_tokens=24)
        for turn in itertools.count():
            if not hand.goes_on():
                break
            if turn % 7 == 6 and hand.loop.scheduler.running:
                hand.preempt(hand.loop.scheduler.running[-1])
    hand.end()
    assert sum(hand.last(request.id).metrics.cached_tokens for request in hand.requests) > 0
    assert hand.loop.steps.whole.num_steps > 10


@pytest.mark.parametrize("seed", range(SEED, SEED + STORMS))
def test_a_storm(engines: Engines, seed: int) -> None:
    print("seed", seed)
    assert next(engines.storms(seed, num_turns=60)) > 0


@NO_REHEARSAL
@FAMILY
def test_000_many_rows_with_hits_and_drafts_outgrow_a_graphs_buffers(
    engine: Callable, story: Callable, family: str
) -> None:
    """1,024 rows, prefix cache and MTP."""
    built = {"max_rows": 1024, "max_step_tokens": 4096, "max_len": 3 * PAGE}
    text = story(family)
    with LLM(engine(family, **built), adaptive_drafts=False, cache_bytes=60 * 2**30) as llm:
        first = len(llm.encode(START))  # what is behind it is greedy
        starts = [first + n % (2 * PAGE - 1 - first) for n in range(1100)]
        for num in (1100, 515):
            outputs = llm.generate(
                [text[:start] for start in starts[:num]], SamplingParams(max_tokens=12, **GREEDY)
            )
            assert all(
                out.token_ids == text[start : start + 12] for out, start in zip(outputs, starts, strict=False)
            )
        assert sum(out.metrics.cached_tokens > 0 for out in outputs) > 200
        assert llm._loop.steps.whole.num_steps > 5


@NO_REHEARSAL
@pytest.mark.parametrize("drafts", ["ngram", "mtp"])
@FAMILY
def test_001_a_needle_and_a_tool_call_survive_graphs_and_drafts(
    engine: Callable, family: str, drafts: str
) -> None:
    needle, call = 'needle = "silver platypus 22"\n', '{"name": "find", "arguments": {"what": "needle"}}\n'
    prompts = [needle + "x = 1\n" * n + needle + "y = 2\n" * n + 'needle = "silver' for n in (1, 5, 20)]
    prompts += [call * n + '{"name": "find", "' for n in (2, 4)]
    params = SamplingParams(max_tokens=40, **GREEDY)
    with LLM(engine(family), drafts="none", cuda_graphs=False, prefix_cache=False) as llm:
        wanted = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    with LLM(engine(family), drafts=drafts) as llm:
        for _ in range(2):
            assert [out.token_ids for out in llm.generate(prompts, params)] == wanted
        assert llm._loop.steps.whole.num_steps > 20


def test_report_003s_pattern_makes_steps_accept_drafts(
    make_hand: Callable[..., EngineHand], story: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark knows what steps are made of, and nothing else runs it without a GPU."""
    monkeypatch.syspath_prepend(str(DEMO.parent / "benchmarks"))
    report = importlib.import_module("gpu_report_003")
    monkeypatch.setattr(report, "RATES", (1.0, 1.0))
    for steps, name in itertools.product((Captured, EagerSteps), ("__init__", "_choice")):
        monkeypatch.setattr(steps, name, getattr(steps, name))  # back behind this
    report.judge_by_pattern()
    wrong = Scripted(lambda request, room: [9] * room)
    hand = make_hand("qwen3.5-code", "scripted", proposer=wrong, cuda_graphs=True)
    hand.submit(story("qwen3.5-code")[:17], max_tokens=81, ignore_eos=True)
    hand.run()
    assert hand.loop.counters.num_steps <= 24  # the prompt's, and 20 of four tokens


@NO_REHEARSAL
@FAMILY
def test_a_grammar_in_a_graph_allows_what_it_allows_without(
    engine: Callable, story: Callable, family: str
) -> None:
    """Beside free requests, drafted, greedy and drawn; a grammar's masks go over with the step."""
    guided = [
        {"regex": "[a-d]{6,20}[0-9]{2}"},
        {"choice": ["def first", "def second"]},
        {"regex": "(ab|c )*"},
    ]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=5, structured_outputs=own)
        for own, temperature in itertools.product(guided, (0.0, 0.8))
    ] + [SamplingParams(max_tokens=24, **GREEDY)] * 2
    prompts = [story(family)[: 20 + 9 * n] for n in range(len(params))]
    with LLM(engine(family), drafts="none", cuda_graphs=False, prefix_cache=False) as llm:
        wanted = [
            llm.generate([prompt], own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)
        ]
    with LLM(engine(family), drafts="mtp", adaptive_drafts=False) as llm:
        assert [out.token_ids for out in llm.generate(prompts, params)] == wanted
        assert llm._loop.steps.whole.num_steps > llm.counters.num_steps / 3


@pytest.mark.parametrize("depth", [0, 2])
@FAMILY
def test_003_and_004_long_windows_beside_none_cross_edges(
    make_hand: Callable[..., EngineHand], story: Callable, family: str, depth: int
) -> None:
    """K = 64 mixed with 0: windows pass several chunk edges and a page's, and none follows any of them."""
    text = story(family)
    lengths = {n: itertools.cycle(c) for n, c in enumerate(([64, 0, 0, 17, 1], [0, 33, 0], [0, 0, 64]))}
    right = windows(lambda ids, num: text[len(ids) : len(ids) + num], lambda request: 40).script
    proposer = Scripted(lambda request, room: right(request, room)[: next(lengths[request.id % 3])])
    hand = make_hand(
        family,
        "scripted",
        {"num_drafts": 64, "drafts": "ngram", "max_step_tokens": 520},
        proposer=proposer,
        cuda_graphs=True,
        pipeline_depth=depth,
    )
    for length in (16, 17, 60, 64, 70):
        hand.submit(text[:length], max_tokens=120)
    hand.end()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : request.prompt_len + 120])
    assert hand.loop.steps.whole.num_steps > hand.loop.counters.num_steps / 2


@NO_REHEARSAL
def test_a_step_that_cannot_be_captured_is_refused_with_a_way_out(
    engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Captured.step

    def waits(decoder: Captured, bucket: Bucket) -> object:
        done = step(decoder, bucket)
        done.told[0].item()
        return done

    with monkeypatch.context() as changed:
        changed.setattr(Captured, "step", waits)
        with pytest.raises(Refused, match=r"cannot be captured.*cuda_graphs=False"):
            LLM(engine(FAMILIES[1]))
    with LLM(engine(FAMILIES[1]), max_rows=2) as llm:
        assert llm.config.cuda_graphs and llm._loop.steps.whole.buckets[0].rows == 2
        assert SIZES["max_rows"] > 2 and len(llm.generate([[5, 6, 7]])[0].token_ids) == 16
