"""Log-probabilities of prompts: the plain run's bits, whatever chunks, batches, drafts, hits and preemptions
there are; and transformers' numbers.

Every hand compares what each request was told with the plain run's logits (kit/engine_hand.py).
"""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from kit import checkpoints
from kit.engine_hand import DEVICE, SMALL, EngineHand, Wanted
from kit.engine_hand import NUM_DRAFTS as K
from kit.engine_hand import PAGE as B

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device import session
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step import output, prompt_lines
from hemiola.runtime.step.recorded import Recorded

FAMILIES = ["nemotron_h_moe", "qwen3_5", "three_convs", "attention_only"]
KINDS = itertools.cycle(["mtp", "ngram", "plain", "scripted"])


def told(hand: EngineHand, request_id: int) -> list:
    (found,) = [p.prompt_logprobs for p in hand.pieces[request_id] if p.prompt_logprobs is not None]
    return found


@pytest.mark.parametrize(
    ("family", "kind", "chunk", "depth"),
    [
        (family, next(KINDS), chunk, depth)
        for (family, chunk), depth in zip(
            itertools.product(FAMILIES, [5, B - 1, 3 * B]), itertools.cycle([0, 1, 2]), strict=False
        )
    ],
)
def test_chunks_and_batches_give_the_plain_runs_values(
    small_hand: Callable, wanted: Wanted, family: str, kind: str, chunk: int, depth: int
) -> None:
    """Prompts of one token, of less and more than a page, twice, beside others that ask for nothing."""
    hand = small_hand(
        family, kind, max_rows=4, max_step_tokens=chunk, pipeline_depth=depth, shuffle=random.Random(chunk)
    )
    text = wanted.story(family)
    for num_top, length in itertools.product((0, 3), (1, 2, B + 3, 3 * B + 1)):
        hand.submit(text[:length], max_tokens=4, prompt_logprobs=num_top, temperature=float(num_top), seed=1)
        hand.submit(text[: length + 1], max_tokens=6, logprobs=2)
        hand.submit(text[: length + 2], max_tokens=6)
    hand.end()
    asked = [request for request in hand.requests if request.params.prompt_logprobs is not None]
    assert len(asked) == 8 and all(len(told(hand, request.id)) == request.prompt_len for request in asked)
    whole = hand.loop.steps.whole
    if isinstance(whole, Recorded):
        assert whole.num_steps == hand.num_plain_steps, "a step that scores nothing was not one call"


def test_a_head_that_drafts_few_tokens_scores_all(engine_hands: Callable, wanted: Wanted) -> None:
    built = SMALL | {"draft_vocab": 48, "num_drafts": K}
    hand = engine_hands("qwen3_5", "mtp", built, max_rows=2, max_step_tokens=B, num_drafts=K)
    text = wanted.story("qwen3_5")
    ids = [hand.submit(text[: 2 * B + n], max_tokens=9, prompt_logprobs=2) for n in range(3)]
    hand.end()
    assert max(entry.token_id for entry in told(hand, ids[0])[1:]) > 48


@pytest.mark.parametrize("family", ["nemotron_h_moe", "three_convs"])
def test_a_hit_does_not_hide_tokens_and_a_scored_prompt_is_found_by_others(
    small_hand: Callable, wanted: Wanted, family: str
) -> None:
    hand, text = small_hand(family, "mtp", prefix_cache=True), wanted.story(family)
    prompt = text[: 2 * B + 5]
    first = hand.submit(prompt, max_tokens=2)
    hand.run()
    scored = hand.submit(prompt, max_tokens=2, prompt_logprobs=1)
    hand.run()
    assert len(told(hand, scored)) == len(prompt)
    assert hand.last(scored).metrics.cached_tokens == 0
    hand.loop.flush()
    again = hand.submit(prompt, max_tokens=2, prompt_logprobs=1)
    hand.run()
    after = hand.submit(prompt, max_tokens=2)
    hand.end()
    assert hand.last(after).metrics.cached_tokens == 2 * B
    assert told(hand, again) == told(hand, scored) and hand.token_ids(first) == hand.token_ids(after)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_a_preempted_prompt_does_not_tell_values_twice(
    small_hand: Callable, wanted: Wanted, family: str, depth: int
) -> None:
    """Within the prompt and behind it. A chunk that runs again, cut elsewhere, scores what is unknown."""
    hand = small_hand(
        family, "mtp", max_rows=2, max_step_tokens=B - 3, prefix_cache=True, pipeline_depth=depth
    )
    text, num_scored, parts = wanted.story(family), 0, 0
    scheduler = hand.loop.scheduler
    sizes = [scheduler.config.model_copy(update={"max_step_tokens": size}) for size in (5, B - 3)]

    def count(plan) -> None:
        nonlocal num_scored, parts
        scored = [row.scored for row in plan.rows if row.scored is not None]
        num_scored += sum(len(each.token_ids) for each in scored)
        parts += any(each.first for each in scored)

    hand.before_step = count
    prompts = {hand.submit(text[: 3 * B + n], max_tokens=12, prompt_logprobs=1): 3 * B + n for n in (1, 4)}
    for turn in itertools.count():
        if not hand.goes_on():
            break
        scheduler.config = sizes[turn // 3 % 2]
        if turn % 4 == 1 and turn < 60 and scheduler.running:
            hand.preempt(scheduler.running[-1])
    hand.end()
    assert scheduler.num_preemptions > 2 and parts, "no chunk began with tokens that were known"
    for request_id, length in prompts.items():
        hand.check(request_id, text[length : length + 12])
        assert len(told(hand, request_id)) == length
    assert num_scored == sum(length - 1 for length in prompts.values()), "a value was computed twice"


def test_a_cancelled_prompt_tells_nothing_and_costs_no_other(small_hand: Callable, wanted: Wanted) -> None:
    hand = small_hand("qwen3_5", "mtp", max_rows=2, max_step_tokens=7, pipeline_depth=1)
    text = wanted.story("qwen3_5")
    gone = hand.submit(text[: 3 * B], max_tokens=2, prompt_logprobs=1)
    stays = hand.submit(text[:B], max_tokens=3, prompt_logprobs=1)
    for _ in range(4):
        hand.turn()
    request = hand.requests[gone - 1]
    assert 0 < len(request.prompt_logprobs) < request.prompt_len - 1
    hand.loop.abort(gone)
    hand.end()
    assert hand.last(gone).finish_reason == "cancelled" and hand.last(gone).prompt_logprobs is None
    assert len(told(hand, stays)) == B


def test_a_prompts_logits_never_lie_in_memory_together(
    small_hand: Callable, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the chunk: so many lines as a step may choose with, and 64 at most."""
    sizes: list[int] = []
    bound = session.bind_scores

    def noted(*given: object) -> Callable:
        logits = bound(*given)

        def seen(lines: torch.Tensor) -> torch.Tensor:
            sizes.append(len(lines))
            return logits(lines)

        return seen

    monkeypatch.setattr(session, "bind_scores", noted)
    hand = small_hand("qwen3_5", "mtp", max_rows=2, max_step_tokens=6 * B)
    hand.submit(wanted.story("qwen3_5")[: 5 * B], max_tokens=2, prompt_logprobs=1)
    hand.end()
    most = prompt_lines.most_lines(hand.config)
    assert most == 2 * (1 + K) and max(sizes) == most and sizes.count(most) >= (5 * B - 1) // most
    assert prompt_lines.most_lines(hand.config.model_copy(update={"max_rows": 4096})) == 64


@pytest.mark.parametrize("depth", [0, 2])
def test_scores_that_cannot_be_read_end_one_request(
    small_hand: Callable, wanted: Wanted, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    hand = small_hand("qwen3_5", "mtp", max_rows=3, max_step_tokens=B, pipeline_depth=depth)
    text, right = wanted.story("qwen3_5"), output.to_logprobs

    def to_logprobs(token_ids: list[int], *parts: torch.Tensor) -> list:
        if parts[1].shape[1] == 3:
            raise ZeroDivisionError("sabotaged")
        return right(token_ids, *parts)

    monkeypatch.setattr(output, "to_logprobs", to_logprobs)
    bad = hand.submit(text[: 2 * B], max_tokens=3, prompt_logprobs=3)
    good = [hand.submit(text[: 2 * B], max_tokens=3, prompt_logprobs=n) for n in (0, 2)]
    hand.end()
    assert hand.last(bad).error == "logprobs: ZeroDivisionError: sabotaged"
    for request_id in good:
        hand.check(request_id, text[2 * B : 2 * B + 3])


@pytest.mark.skipif(DEVICE == "cuda", reason="its bf16 has values of its own")
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5", "attention_only"])
def test_values_are_those_of_transformers(
    small_hand: Callable, wanted: Wanted, tiny_checkpoint: Callable, family: str
) -> None:
    """fp32's log-softmax, within the rounding of two arithmetics (1e-4 of a logit)."""
    prompt = wanted.story(family)[: 2 * B + 3]
    hand = small_hand(family)
    request_id = hand.submit(prompt, max_tokens=1, prompt_logprobs=4)
    hand.end()
    with torch.no_grad():
        logits = checkpoints.reference(tiny_checkpoint(family))(
            torch.tensor([prompt]), use_cache=False
        ).logits
    theirs = logits[0].log_softmax(-1)
    assert told(hand, request_id)[0] is None
    for at, found in enumerate(told(hand, request_id)[1:]):
        assert found.token_id == prompt[at + 1]
        assert found.logprob == pytest.approx(float(theirs[at, prompt[at + 1]]), abs=2e-4)
        best = theirs[at].topk(4).values.tolist()
        assert [value for _, value in found.top] == pytest.approx(best, abs=2e-4)


def test_an_engine_of_another_compiler_refuses_them(tiny_engine: Callable) -> None:
    with LLM(tiny_engine("qwen3_5", target="onnxruntime")) as llm:
        limit = "prompt_logprobs are not computed by engines of onnxruntime; leave it out, or build with"
        with pytest.raises(Refused, match=limit):
            llm.generate([3, 4, 5], SamplingParams(prompt_logprobs=0))


def test_the_api_gives_a_line_for_each_token_of_the_prompt(tiny_engine: Callable) -> None:
    with LLM(tiny_engine("qwen3_5"), max_step_tokens=8, max_rows=2) as llm:
        prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
        scored, plain = llm.generate(
            [prompt, prompt], [SamplingParams(max_tokens=3, prompt_logprobs=1), SamplingParams(max_tokens=3)]
        )
        assert plain.prompt_logprobs is None and plain.token_ids == scored.token_ids
        first, *others = scored.prompt_logprobs or ()
        assert first is None and [entry.token_id for entry in others if entry] == prompt[1:]
        (own,) = llm.generate(prompt[:4], SamplingParams(max_tokens=1, logprobs=1, logit_bias={11: 1e4}))
        assert own.logprobs == [others[3]], "a chosen token has the same value"
        (one,) = llm.generate([5], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert one.prompt_logprobs == [None]
        pieces = list(llm.stream(prompt, SamplingParams(max_tokens=3, prompt_logprobs=1)))
        assert [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs] == [
            scored.prompt_logprobs
        ]
        assert pieces[0].prompt_logprobs == scored.prompt_logprobs


def test_of_several_answers_the_first_scores_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=2, logprobs=1)
    assert [each.prompt_logprobs for each in params.each_of(3)] == [2, None, None]
    seeded = SamplingParams(prompt_logprobs=0, seed=4).each_of(2)
    assert [(each.prompt_logprobs, each.seed) for each in seeded] == [(0, 4), (None, 5)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nan_of_a_chunk_stays_among_the_scores_of_a_request_that_starts_anew(
    small_hand: Callable, wanted: Wanted, depth: int
) -> None:
    """Preempted before it chose a token, it computed the prompt anew, but not what was scored."""
    hand = small_hand("qwen3_5", "plain", max_rows=2, max_step_tokens=5, pipeline_depth=depth)
    prompt, states = wanted.story("qwen3_5")[: B - 1], hand.manifest.states
    beside = hand.submit(wanted.story("qwen3_5", 1)[:3], max_tokens=40)
    hand.turn()
    struck, faults = hand.submit(prompt, max_tokens=2, prompt_logprobs=1), []

    def strike(plan: Plan) -> None:
        for row in plan.rows:
            if row.request.id == struck and row.edges[0] and not row.chooses and not faults:
                faults.append(row)
                for state in states:
                    if state.name.endswith(".state"):
                        hand.storage.tensors[state.name][row.slot_id] = torch.nan

    hand.before_step = strike
    request = hand.requests[-1]
    while not faults:
        hand.turn()
    if not hand.ended(struck):
        hand.preempt(request)
    hand.run()
    last = hand.last(struck)
    assert last.finish_reason == "error" and "NaN for the token at position" in str(last.error)
    assert hand.last(beside).finish_reason == "length"
    assert all(math.isfinite(score.logprob) for score in request.prompt_logprobs)
    hand.check_contents()
    again = hand.submit(prompt, max_tokens=2, prompt_logprobs=1)
    hand.end()
    assert len(told(hand, again)) == len(prompt)
