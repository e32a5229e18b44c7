"""Engines on a GPU: every logit is the plain run's, bit for bit, whatever a request shares its steps with.

The bundled checkpoints, for their sizes are such as kernels take, and their drafts are often right.
"""

import time
from collections.abc import Callable

import pytest
import torch
from kit.gpu_engines import DEMO, FAMILIES, MARKS, NO_REHEARSAL, PAGE, SAMPLED
from kit.harness import Harness
from oracle import Oracle

from hemiola.runtime import manifest
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM

pytestmark = MARKS
FAMILY = pytest.mark.parametrize("family", FAMILIES)
GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
TOLERANCE = 0.05  # of the largest logit: bf16 keeps 8 bits, and ten layers round some 50 times


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "scripted"])
@FAMILY
@GRAPHS
def test_steps_shared_with_anybody_give_the_plain_runs_bits(
    make_hand: Callable, story: Callable, family: str, kind: str, graphs: bool
) -> None:
    """Batches, chunked prompts, drafts, hits, two steps under way: logits, drafts, pages, snapshots."""
    sizes = {"max_step_tokens": 90, "max_rows": 5, "pipeline_depth": 2}
    hand, text = make_hand(family, kind, cuda_graphs=graphs, **sizes), story(family)
    for _ in range(2):  # then everything is a hit
        for length in (15, 16, 17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5, 3 * PAGE):
            hand.submit(text[:length], max_tokens=20)
        hand.run()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : request.prompt_len + 20])
    assert hand.last(len(hand.requests)).metrics.cached_tokens > 0
    assert not graphs or hand.loop.steps.whole.num_steps > hand.loop.counters.num_steps / 2
    hand.end()


@pytest.mark.parametrize("kind", ["plain", "mtp"])
@FAMILY
@GRAPHS
def test_preempted_requests_go_on_with_the_same_bits(
    make_hand: Callable, story: Callable, family: str, kind: str, graphs: bool
) -> None:
    sizes = {"max_len": 4 * PAGE, "num_pages": 9, "pipeline_depth": 1}
    hand, text = make_hand(family, kind, cuda_graphs=graphs, **sizes), story(family)
    ids = [hand.submit(text[first : first + 60], max_tokens=90) for first in (0, 21, 42, 63)]
    hand.end()
    assert hand.loop.counters.num_preemptions > 0
    hand.check(ids[0], text[60:150])
    assert all(hand.last(request_id).finish_reason == "length" for request_id in ids)


@FAMILY
@GRAPHS
def test_sampled_tokens_are_those_of_a_lone_request(
    make_hand: Callable, story: Callable, family: str, graphs: bool
) -> None:
    alone = {}
    for seed in range(4):
        hand = make_hand(family, "plain", prefix_cache=False)
        hand.submit(story(family)[:30], max_tokens=20, seed=seed, **SAMPLED)
        hand.run()
        alone[seed] = hand.token_ids(1)
    assert len(set(map(tuple, alone.values()))) > 1
    for kind in ("ngram", "mtp"):
        hand = make_hand(family, kind, pipeline_depth=1, cuda_graphs=graphs)
        ids = {hand.submit(story(family)[:30], max_tokens=20, seed=seed, **SAMPLED): seed for seed in alone}
        hand.submit(story(family)[:50], max_tokens=30)
        hand.end()
        for request_id, seed in ids.items():
            assert hand.token_ids(request_id) == alone[seed]


@FAMILY
def test_logits_are_the_oracles_within_bf16(engine: Callable, story: Callable, family: str) -> None:
    text = story(family)[:150]
    found, wanted = Harness(engine(family)).run(text).cpu(), Oracle(DEMO / family).logits(text)
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    same = (found.argmax(1) == wanted.argmax(1)).float().mean().item()
    print(
        f"{family}: error {error:.4f} of the largest logit, {same:.1%} of the greedy tokens are the oracle's"
    )
    assert error < TOLERANCE and same > 0.9


@NO_REHEARSAL
@pytest.mark.parametrize("kind", ["ngram", "mtp"])
@FAMILY
@GRAPHS
def test_no_launch_waits_for_the_gpu(
    make_hand: Callable, story: Callable, family: str, kind: str, graphs: bool
) -> None:
    """The host waits where it reads a verdict, and nowhere else."""
    sizes = {"max_step_tokens": 90, "pipeline_depth": 1}
    hand, text = make_hand(family, kind, cuda_graphs=graphs, **sizes), story(family)
    hand.storage.poison = False
    vars(hand.loop.steps).pop("launch")  # the hand's own, which looks
    launch = hand.loop._launch

    def strict(plan: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for length in (30, 100, 10):  # what is compiled and tuned, is
        hand.submit(text[:length], max_tokens=20)
    hand.run()
    hand.loop._launch = strict
    for length in (30, 100, 10):
        hand.submit(text[:length], max_tokens=20)
        hand.submit(text[:length], max_tokens=10, **SAMPLED, min_p=0.01, repetition_penalty=1.1, logprobs=3)
    hand.run()
    assert all(hand.last(request.id).finish_reason == "length" for request in hand.requests)


@NO_REHEARSAL
@FAMILY
def test_llm_answers_by_itself(engine: Callable, story: Callable, family: str) -> None:
    """The thread, the auto sizes, the text; depth 1 unless asked otherwise."""
    text, start = story(family), time.perf_counter()
    with LLM(engine(family)) as llm:
        assert llm.config.pipeline_depth == 1 and manifest.load(engine(family)).arch.startswith("sm_")
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([text[:length] for length in range(15, 45, 3)], params)
        print(f"{family}: opened and answered in {time.perf_counter() - start:.1f} s")
    for output in outputs:
        start = len(output.prompt_token_ids)
        assert output.token_ids == text[start : start + 40]
