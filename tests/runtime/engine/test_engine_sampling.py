"""Penalties, biases, bad words and min_tokens in an engine, drafted and in company: as the oracle has it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from kit.plain_sampling import edited
from oracle import Oracle

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.llm import LLM

Logits = Callable[[tuple[int, ...]], torch.Tensor]
PROMPTS = [[7, 8, 9] * 6, [40, 41], list(range(3, 30)), [5] * 9]
ASKED = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {11: 3.0, 12: 2.5}, "frequency_penalty": 0.5},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5},
]
GAP = 1e-4  # the oracle adds in another order


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Callable[..., Path]) -> Logits:
    """Asked once for what every kind of drafts must say."""
    made = Oracle(tiny_checkpoint("qwen3_5"))
    return cache(lambda ids: made.logits(list(ids)))


@pytest.fixture(scope="module", params=["none", "ngram", "mtp"])
def llm(request: pytest.FixtureRequest, tiny_engine: Callable[..., Path]) -> LLM:
    with LLM(tiny_engine("qwen3_5"), max_rows=4, drafts=request.param, adaptive_drafts=False) as made:
        yield made


def check(oracle: Logits, output: Output, params: SamplingParams, stop_ids: tuple[int, ...] = ()) -> None:
    """Every token is the best one of the oracle's logits, changed by the plain formulas."""
    ids = [*output.prompt_token_ids, *output.token_ids]
    rule = Rule(params, 0, len(output.prompt_token_ids), frozenset(stop_ids), params.bad_words_ids)
    logits = oracle(tuple(ids))
    for place in range(rule.prompt_len, len(ids)):
        wanted = edited(logits[place - 1].tolist(), rule, ids[:place])
        assert wanted[ids[place]] >= max(wanted) - GAP, f"token {place - rule.prompt_len}"


def test_greedy_tokens_are_the_oracles(llm: LLM, oracle: Logits) -> None:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **asked) for asked in ASKED]
    outputs = llm.generate(PROMPTS, params)
    plain = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    for output, own, other in zip(outputs, params, plain, strict=True):
        check(oracle, output, own)
        assert output.token_ids != other.token_ids, "the option changes nothing here"
    if llm.config.drafts == "ngram":
        kept, judged = (
            sum(sum(getattr(o.metrics, name)) for o in outputs) for name in ("accepted", "drafted")
        )
        assert 0 < kept < judged, "drafts of both kinds"


def test_words_and_stops_that_would_have_come_do_not(llm: LLM, oracle: Logits) -> None:
    free = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    for output in free:
        a, b, c = output.token_ids[3:6]
        for words in ([[a]], [[a, b]], [[a, b, c], [b]]):
            params = SamplingParams(max_tokens=24, ignore_eos=True, bad_words_ids=words)
            (found,) = llm.generate([output.prompt_token_ids], params)
            check(oracle, found, params)
            assert found.token_ids != output.token_ids
        params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[a], min_tokens=9)
        (found,) = llm.generate([output.prompt_token_ids], params)
        check(oracle, found, params, (a,))
        assert len(found.token_ids) > 9 and a not in found.token_ids[:9]
